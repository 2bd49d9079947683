"""When a run ends: all ranks together, whichever of them has a callback that asks for it."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalite.train.callbacks import Callback
from megalite.train.loop import TrainingLoop

RANKS = 2


class World:
    """Ranks as threads: what one hands in, all see. A rank that is not followed by the others fails."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=5)
        self._values: list[Any] = [None] * RANKS

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        seen = list(self._values)
        self._barrier.wait()
        return seen


class Mesh:
    """The collectives of a ParallelMesh that a loop calls."""

    def __init__(self, world: World, rank: int):
        self._world, self.rank = world, rank

    def max_over_world(self, value: float) -> float:
        return max(self._world.exchange(self.rank, value))

    def gather_objects(self, value: Any) -> list[Any] | None:
        seen = self._world.exchange(self.rank, value)
        return seen if self.rank == 0 else None

    def broadcast_object(self, value: Any) -> Any:
        return self._world.exchange(self.rank, value)[0]


class Trainer:
    """In a trainer's place: counts steps."""

    total_steps = 6

    def __init__(self, mesh: Mesh):
        self.mesh, self.saved = mesh, list[int]()
        self.state = SimpleNamespace(step=0, best_step=None, validations_without_improvement=0)
        validation = {"every": None, "at_start": False, "patience": None}
        self.config = SimpleNamespace(
            checkpoint=SimpleNamespace(best=False, every=2, keep_last=None),
            validation=SimpleNamespace(**validation),
        )

    def train_step(self) -> Any:
        self.state.step += 1
        return SimpleNamespace(step=self.state.step)

    def save(self, folder: Path) -> Path:
        self.saved.append(self.state.step)
        return folder / str(self.state.step)


class AsksAfterStep3(Callback):
    def on_step_end(self, run: Any, report: Any) -> None:
        if report.step == 3:
            run.stop("seen enough")


class AsksWhenSaved(Callback):
    def on_checkpoint(self, run: Any, checkpoint: Path) -> None:
        run.stop("there is a checkpoint")


def run(callbacks: Sequence[Sequence[Callback]]) -> list[tuple[str, int, list[int]]]:
    """Of each rank, which has callbacks of its own: the reason to end, the last step, the steps that were saved."""
    world, ended = World(), dict[int, tuple[str, int, list[int]]]()

    def be_rank(rank: int) -> None:
        trainer: Any = Trainer(Mesh(world, rank))
        reporter = cast(Any, SimpleNamespace(step=lambda *_: None))
        loop = TrainingLoop(trainer, {}, reporter, Path("checkpoints"), callbacks=callbacks[rank])
        ended[rank] = (loop.run(), trainer.state.step, trainer.saved)

    ranks = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return [ended[rank] for rank in range(RANKS)]


def test_a_run_without_callbacks_ends_with_its_last_step() -> None:
    assert run([[], []]) == [("", 6, [2, 4, 6])] * RANKS


@pytest.mark.parametrize("rank", range(RANKS))
def test_one_rank_that_asks_ends_all_after_the_step_with_a_checkpoint(rank: int) -> None:
    """Also where the others have no callback at all."""
    callbacks: list[list[Callback]] = [[], []]
    callbacks[rank].append(AsksAfterStep3())
    assert run(callbacks) == [("seen enough", 3, [2, 3])] * RANKS


def test_what_is_asked_for_between_two_steps_ends_the_run_after_the_next() -> None:
    assert run([[AsksWhenSaved()], [Callback()]]) == [("there is a checkpoint", 3, [2, 3])] * RANKS
