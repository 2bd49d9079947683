"""Trains one contender on the ranks of one layout, and measures it. Imports neither torch nor a contender at its top.

A contender is a module of this package with `build(layout, start) -> Trained`, called on every rank.
"""

import importlib
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.ranks import run_fresh_ranks
from megalite.monitor.memory import process_memory
from megalite.topology.context import ContextMethod

CHECKED_STEPS = 3  # their losses are compared
ON_THIS_MACHINE = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Trained:
    """A contender on one rank. step: does a training step and returns the loss; None on a rank that does not know it.

    save, load: write a checkpoint of weights and optimizer into an empty folder, and load it; collective.
    """

    step: Callable[[], float | None]
    save: Callable[[Path], None] | None = None
    load: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class PeerLayout:
    """How two cores are used, and what they train on: `sequences` of `length` tokens.

    zero: the stage of ZeRO. checkpoints: whether saving and loading are timed.
    """

    name: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    zero: int = 0
    checkpoints: bool = False
    sequences: int = 4
    length: int = 256

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def micro_batches(self) -> int:
        return 4 if self.pipeline > 1 else 1


@dataclass(frozen=True)
class Contender:
    """A module of this package. ours: megalite; schedule, balanced, context_method: see Setup.

    alone: trains in one process, whatever the layout.
    """

    name: str
    module: str
    ours: bool = False
    schedule: str = "1f1b"
    balanced: bool = False
    context_method: ContextMethod = "gather"
    alone: bool = False


@dataclass(frozen=True)
class Start:
    """The beginning of a contender. weights: a file in transformers' form; began: on the clock of time.monotonic."""

    weights: Path
    threads: int
    began: float
    contender: Contender
    picotron: Path | None


@dataclass(frozen=True)
class Figures:
    """One contender in one round. losses: of the first steps; peak_mib: of the largest process."""

    seconds: float
    losses: tuple[float, ...]
    first_step_seconds: float
    peak_mib: int
    save_seconds: float | None = None
    load_seconds: float | None = None


@dataclass(frozen=True)
class RankFigures:
    losses: tuple[float | None, ...]
    first_step_seconds: float
    seconds: tuple[float, ...]
    peak_mib: int
    save_seconds: float | None = None
    load_seconds: float | None = None


def measure(
    contender: Contender,
    layout: PeerLayout,
    weights: Path,
    *,
    cores: int,
    steps: int,
    picotron: Path | None = None,
) -> Figures:
    """Train in fresh processes, which share the cores evenly. Raises RuntimeError where a rank fails."""
    if contender.alone:
        layout = replace(layout, data=1, tensor=1, pipeline=1, context=1)
    start = Start(weights, cores // layout.ranks, time.monotonic(), contender, picotron)
    with tempfile.TemporaryDirectory(prefix="megalite-peers-") as folder:
        arguments = (layout, start, steps, Path(folder))
        ranks: list[RankFigures] = run_fresh_ranks(_train, layout.ranks, *arguments)
    return summary(ranks)


def summary(ranks: Sequence[RankFigures]) -> Figures:
    """The slowest rank's times, and the losses averaged over the ranks that know them."""
    losses = zip(*([loss for loss in rank.losses] for rank in ranks), strict=True)
    return Figures(
        seconds=max(statistics.median(rank.seconds) for rank in ranks),
        losses=tuple(statistics.fmean(loss for loss in step if loss is not None) for step in losses),
        first_step_seconds=max(rank.first_step_seconds for rank in ranks),
        peak_mib=max(rank.peak_mib for rank in ranks),
        save_seconds=ranks[0].save_seconds,
        load_seconds=ranks[0].load_seconds,
    )


def _train(layout: PeerLayout, start: Start, steps: int, folder: Path) -> RankFigures:
    os.environ.update(ON_THIS_MACHINE, OMP_NUM_THREADS=str(start.threads))
    warnings.simplefilter("ignore")
    trained: Trained = importlib.import_module(f"benchmarks.peers.{start.contender.module}").build(
        layout, start
    )
    losses, seconds = [], []
    first = 0.0
    for index in range(CHECKED_STEPS + steps):
        began = time.perf_counter()
        loss = trained.step()
        if index == 0:
            first = time.monotonic() - start.began
        if index < CHECKED_STEPS:
            losses.append(loss)
        else:
            seconds.append(time.perf_counter() - began)
    peak_mib = round(process_memory().peak_bytes / 2**20)
    saved, loaded = _checkpoint(trained, folder) if layout.checkpoints else (None, None)
    _meet()
    _leave()
    return RankFigures(tuple(losses), first, tuple(seconds), peak_mib, saved, loaded)


def _checkpoint(trained: Trained, folder: Path) -> tuple[float | None, float | None]:
    """Seconds to save and to load. Raises AssertionError where training does not go on from there."""
    if trained.save is None or trained.load is None:
        return None, None
    saved = _seconds(trained.save, folder)
    expected = trained.step()
    loaded = _seconds(trained.load, folder)
    assert trained.step() == expected, "the checkpoint does not hold the state of the training"
    return saved, loaded


def _seconds(action: Callable[[Path], None], folder: Path) -> float:
    _meet()
    began = time.perf_counter()
    action(folder)
    _meet()
    return time.perf_counter() - began


def _meet() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
