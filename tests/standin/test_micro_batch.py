"""The choice of a micro batch on an accelerator, and what its allocator gives back."""

import tempfile
from pathlib import Path

import pytest
import torch

from megalite.launcher.rank.detect import LOOPBACK, local_rank_infos
from megalite.monitor.memory import empty_cache, free_bytes, memory_error
from megalite.parallel.mesh import ParallelMesh
from megalite.train.step.micro_batch import TrialRank, in_micro_batches
from megalite.train.step.trial import trial_bytes
from tests.support.ranks import RankPool
from tests.support.standin import use_standin
from tests.unit.train.step.test_micro_batch import loaded

MEGABYTE = 1 << 20


def tried_on_a_card() -> tuple[float, bool, str]:
    """Return the bytes of a trial, whether a small card is too small, and the choice by the memory of a card."""
    device, compiled = torch.device("standin"), use_standin()
    mesh = ParallelMesh.single(device)
    with tempfile.TemporaryDirectory() as folder:
        config = loaded(Path(folder))
        used, full = trial_bytes(config.in_micro_batches(16), mesh, 300, None), False
        compiled.set_memory_limit(MEGABYTE)
        try:
            trial_bytes(config.in_micro_batches(16), mesh, 300, None)
        except Exception as error:
            full = memory_error(error) is not None
        finally:
            compiled.set_memory_limit(0)
        [info] = local_rank_infos(1, Path(folder) / "rendezvous")
        rank = TrialRank(info, mesh, LOOPBACK, 1)
        _, why = in_micro_batches(config, 300, rank, True, None, None)
    return used, full, why


def free_after_the_cache() -> bool:
    device = torch.device("standin")
    empty_cache(device)
    free, on_cpu = free_bytes(device), free_bytes(torch.device("cpu"))
    return free is not None and free > 0 and on_cpu is None


@pytest.mark.extended
def test_a_card_is_tried(devices: RankPool) -> None:
    [(used, full, why)] = devices.run(tried_on_a_card, world_size=1)
    assert used > MEGABYTE and full
    assert why.startswith("micro batch 16 x 1: the largest of 1, 2, 4, 8, 16 that fits ")


def test_a_card_says_what_is_free(devices: RankPool) -> None:
    assert devices.run(free_after_the_cache, world_size=1) == [True]
