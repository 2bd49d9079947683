"""When a run ends: all ranks together, whichever of them has a callback that asks for it."""

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalite.errors import TrainingError
from megalite.launcher.control.progress import Activity, progress
from megalite.monitor.work import working
from megalite.train.callbacks import Callback
from megalite.train.loop import StopConditions, TrainingLoop
from megalite.train.time_budget import Deadline, TimeBudget
from tests.support.waiting import PATIENCE

RANKS = 2
STEP_SECONDS = 100.0
# The methods of a reporter that this file does not ask about.
SILENT: dict[str, Any] = {
    "begin": lambda _: None,
    "measures": SimpleNamespace(step=nullcontext),
    "profiled": lambda _: nullcontext(),
    "step": lambda *_, writes: None,
    "traced": lambda _: nullcontext(),
    "working": lambda title, *_: working(title, shown=False),
}


class World:
    """Ranks as threads: what one hands in, all see. A rank that is not followed by the others fails."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=PATIENCE)
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
        self._world, self.rank, self.device = world, rank, rank

    def sum_over_world(self, values: list[float]) -> list[float]:
        return [sum(each) for each in zip(*self._world.exchange(self.rank, values), strict=True)]

    def gather_objects(self, value: Any) -> list[Any] | None:
        seen = self._world.exchange(self.rank, value)
        return seen if self.rank == 0 else None

    def broadcast_object(self, value: Any) -> Any:
        return self._world.exchange(self.rank, value)[0]


class Trainer:
    """In a trainer's place: counts steps."""

    total_steps = 6
    empty_cache_every = 0
    routers = SimpleNamespace(newly_dead=list)

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.state = SimpleNamespace(step=0, best_step=None, validations_without_improvement=0)
        validation = {"every": None, "at_start": False, "patience": None}
        self.config = SimpleNamespace(
            checkpoint=SimpleNamespace(best=False, every=2),
            monitor=SimpleNamespace(self_check_every=0),
            training=SimpleNamespace(empty_cache_every=self.empty_cache_every),
            validation=SimpleNamespace(**validation),
        )

    def train_step(self, flags: Callable[[], Sequence[bool]], before_update: Callable[[], object]) -> Any:
        before_update()
        raised = tuple(count > 0 for count in self.mesh.sum_over_world([float(each) for each in flags()]))
        self.state.step += 1
        return SimpleNamespace(
            step=self.state.step,
            step_seconds=STEP_SECONDS,
            flags=raised,
            skipped_for="",
            rolled_back_to=None,
        )


class Saver:
    """In a saver's place: what is saved at a step is published after the next, unless it is the last."""

    busy = failed = False
    copies = resumed_from = None

    def __init__(self, trainer: Trainer):
        self.trainer, self.saved, self._in_flight = trainer, list[int](), list[Any]()

    def point_to_best(self) -> None:
        pass

    def before_update(self) -> None:
        pass

    def stepped(self, report: Any) -> None:
        pass

    def expected_seconds(self, *, another: bool) -> float:
        return 40.0 if another else 20.0

    def save(self, *, at_once: bool) -> list[Any]:
        progress.begin(Activity.SAVING)
        self.saved.append(self.trainer.state.step)
        self._in_flight.append(SimpleNamespace(path=Path(str(self.trainer.state.step))))
        return self.finish() if at_once else []

    def advance(self, *, busy: bool, failed: bool) -> list[Any]:
        return self.finish()

    def finish(self) -> list[Any]:
        done, self._in_flight = self._in_flight, []
        return done


class AsksAfterStep3(Callback):
    def on_step_end(self, run: Any, report: Any) -> None:
        if report.step == 3:
            run.stop("seen enough")


class SeesPhases(Callback):
    """Notes what a hang report would say of a callback that hangs."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, run: Any, report: Any) -> None:
        self.seen.append(progress.phase)

    def on_checkpoint(self, run: Any, checkpoint: Path) -> None:
        self.seen.append(progress.phase)


class AsksWhenSaved(Callback):
    def on_checkpoint(self, run: Any, checkpoint: Path) -> None:
        run.stop("there is a checkpoint")


class Told:
    """In the place of StopSignals."""

    def __init__(self, told: Callable[[], signal.Signals | None]):
        self._told = told
        self.begun = False

    def __call__(self) -> signal.Signals | None:
        return self._told()

    def first_step_over(self) -> None:
        self.begun = True


def stops(told: Callable[[], signal.Signals | None], budget: TimeBudget | None = None) -> StopConditions:
    return StopConditions(cast(Any, Told(told)), budget or TimeBudget())


def run(
    callbacks: Sequence[Sequence[Callback]],
    told_at: Sequence[int | None] = (None, None),
    told: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGTERM),
    budget: Callable[[Any], TimeBudget] = lambda _: TimeBudget(),
) -> list[tuple[str, int, list[int]]]:
    """Return for each rank, with its own callbacks: the reason to end, the last step, and the saved steps.

    told_at: the step in which each rank is told to end, before its update; told: by which signal. budget: that of rank
    0's trainer.
    """
    world, ended, codes = World(), dict[int, tuple[str, int, list[int]]](), dict[int, int]()

    def be_rank(rank: int) -> None:
        trainer: Any = Trainer(Mesh(world, rank))
        reporter = cast(Any, SimpleNamespace(saved=lambda _: None, **SILENT))
        saver: Any = Saver(trainer)
        loop = TrainingLoop(
            trainer,
            {},
            reporter,
            saver,
            callbacks=callbacks[rank],
            stops=stops(
                lambda: (
                    told[rank]
                    if told_at[rank] is not None and trainer.state.step + 1 >= told_at[rank]
                    else None
                ),
                budget=budget(trainer) if rank == 0 else TimeBudget(),
            ),
        )
        ended[rank] = (loop.run(), trainer.state.step, saver.saved)
        codes[rank] = loop.exit_code
        assert loop.saved == Path(str(saver.saved[-1]))

    ranks = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    [code] = set(codes.values())
    stopped = {"SIGTERM": 75, "SIGUSR1": 75, "Ctrl-C": 130}
    assert code == (75 if " s before " in ended[0][0] else stopped.get(ended[0][0], 0))
    return [ended[rank] for rank in range(RANKS)]


def test_a_run_without_callbacks_ends_with_its_last_step() -> None:
    assert run([[], []]) == [("", 6, [2, 4, 6])] * RANKS


def test_what_follows_a_save_is_no_save() -> None:
    """A hang in a save is told six times as late."""
    sees = SeesPhases()
    progress.begin(Activity.BETWEEN_STEPS)
    run([[sees], [SeesPhases()]])
    assert set(sees.seen) == {"between two steps"} and len(sees.seen) == 6 + 3


@pytest.mark.parametrize("rank", range(RANKS))
def test_one_rank_that_asks_ends_all_after_the_step_with_a_checkpoint(rank: int) -> None:
    """Also where the others have no callback at all."""
    callbacks: list[list[Callback]] = [[], []]
    callbacks[rank].append(AsksAfterStep3())
    assert run(callbacks) == [("seen enough", 3, [2, 3])] * RANKS


def test_a_card_gets_unused_memory_back_after_every_nth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[list[int | str]] = [[] for _ in range(RANKS)]

    class NotesSteps(Callback):
        def __init__(self, rank: int):
            self._rank = rank

        def on_step_end(self, run: Any, report: Any) -> None:
            events[self._rank].append(report.step)

    monkeypatch.setattr("megalite.train.loop.empty_cache", lambda device: events[device].append("emptied"))
    run([[NotesSteps(rank)] for rank in range(RANKS)])
    assert events == [[1, 2, 3, 4, 5, 6]] * RANKS
    monkeypatch.setattr(Trainer, "empty_cache_every", 4)
    events[:] = [[] for _ in range(RANKS)]
    run([[NotesSteps(rank)] for rank in range(RANKS)])
    assert events == [[1, 2, 3, 4, "emptied", 5, 6]] * RANKS


def test_what_is_asked_for_between_two_steps_ends_the_run_after_the_next() -> None:
    assert run([[AsksWhenSaved()], [Callback()]]) == [("there is a checkpoint", 4, [2, 4])] * RANKS


def test_a_run_that_fails_on_all_ranks_completes_what_it_saved_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, published = World(), list[tuple[int, Path]]()

    step = Trainer.train_step

    def train_step(trainer: Trainer, *arguments: Callable[[], Any]) -> Any:
        if trainer.state.step == 2:
            raise TrainingError("step 3: the gradient norm is nan")
        return step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "train_step", train_step)

    def be_rank(rank: int) -> None:
        trainer: Any = Trainer(Mesh(world, rank))
        saver: Any = Saver(trainer)
        reporter = cast(
            Any,
            SimpleNamespace(saved=lambda each: published.append((rank, each.path)), **SILENT),
        )
        with pytest.raises(TrainingError, match="step 3"):
            TrainingLoop(trainer, {}, reporter, saver, stops=stops(lambda: None)).run()

    ranks = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert sorted(published) == [(rank, Path("2")) for rank in range(RANKS)]


@pytest.mark.parametrize("told_at", [(3, None), (None, 3), (3, 5)])
def test_one_rank_that_is_told_to_end_ends_all_after_the_step_with_a_checkpoint(
    told_at: tuple[int | None, int | None],
) -> None:
    assert run([[], []], told_at) == [("SIGTERM", 3, [2, 3])] * RANKS


@pytest.mark.parametrize("told_at", [(3, None), (None, 3)])
def test_sigusr1_counts_as_sigterm(told_at: tuple[int | None, int | None]) -> None:
    assert run([[], []], told_at, (signal.SIGUSR1,) * RANKS) == [("SIGUSR1", 3, [2, 3])] * RANKS


def test_the_clock_of_rank_0_ends_all_while_there_is_time_for_the_last_checkpoint() -> None:
    """During step 3 two steps and a checkpoint fit into the 300 s that are left, and not into 200 s during step 4."""

    def budget(trainer: Any) -> TimeBudget:
        return TimeBudget([Deadline(500.0, "dinner")], clock=lambda: STEP_SECONDS * trainer.state.step)

    assert run([[], []], budget=budget) == [("200 s before dinner", 4, [2, 4])] * RANKS


def test_a_start_whose_time_is_over_makes_a_step_first() -> None:
    def budget(trainer: Any) -> TimeBudget:
        return TimeBudget([Deadline(90.0, "dinner")], clock=lambda: 80.0)

    assert run([[], []], budget=budget) == [("10 s before dinner", 1, [1])] * RANKS


@pytest.mark.parametrize("told", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_ctrl_c_on_any_rank_counts_before_sigterm(told: tuple[signal.Signals, signal.Signals]) -> None:
    assert run([[], []], (3, 3), told) == [("Ctrl-C", 3, [2, 3])] * RANKS


def test_a_run_that_is_told_to_end_in_its_last_step_is_done() -> None:
    assert run([[], []], (6, 6)) == [("", 6, [2, 4, 6])] * RANKS
