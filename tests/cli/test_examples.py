"""megalite examples: the examples and launch scripts, copied out of a checkout; test_build.py has those of a wheel."""

from pathlib import Path

import pytest

from megalite.cli import main
from tests.support.jobs import ROOT


def test_they_are_copied_and_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples"]) == 0
    assert (
        "next: cd megalite-examples && megalite train examples/quickstart/run.toml" in capsys.readouterr().out
    )
    copy = tmp_path / "megalite-examples"
    for name in (
        "examples/quickstart/run.toml",
        "examples/pretrain/8b.toml",
        "launch/hostfile.example",
        "launch/jobset.yaml",
        "launch/slurm.sbatch",
    ):
        assert (copy / name).read_bytes() == (ROOT / name).read_bytes()
    assert (copy / "launch/torchrun.sh").stat().st_mode & 0o111, "a launch script must stay executable"
    # The set-up is one of the checkout's.
    assert not (copy / "examples/setup.sh").exists() and not (copy / "launch/Dockerfile").exists()
    # A remedy that can be typed: it does work.
    assert main(["examples"]) == 2
    said = capsys.readouterr().err
    assert "megalite-examples/examples exists; megalite examples megalite-examples-2" in said
    assert main(["examples", "megalite-examples-2"]) == 0
