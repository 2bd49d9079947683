"""How ranks meet: with the times of the run file."""

from pathlib import Path

import pytest

from megalite.launcher.control.connection import RendezvousLimits
from megalite.launcher.control.hang import HangPolicy
from megalite.launcher.control.rank_process import RankEnd
from megalite.launcher.rank.detect import RankInfo
from megalite.topology.axes import Layout
from megalite.train import meet_ranks as module
from tests.unit.config.runs import load


def test_the_times_of_the_run_bound_the_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Met(Exception):
        pass

    def meet(info: RankInfo, limits: RendezvousLimits, *_: object, **__: object) -> None:
        raise Met(limits)

    monkeypatch.setattr(module, "meet", meet)
    flags = ("--launch.heartbeat_seconds", "7", "--launch.rendezvous_seconds", "11")
    info = RankInfo(0, 2, 0, 2, "n0", 29500, "slurm", "n0")
    with pytest.raises(Met) as met:
        module.meet_ranks(info, load(tmp_path, flags=flags).config, RankEnd(info, Layout(data=2), tmp_path))
    assert met.value.args == (RendezvousLimits(11, 7, HangPolicy(60, stops=True, collective_seconds=1800)),)
