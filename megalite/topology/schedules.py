"""Pipeline schedules as data: the rules of each schedule and each stage's order of actions. No torch.

parallel/schedule.py runs them. Their orders are also those of torch.distributed.pipelining.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from megalite.errors import counted

ActionKind = Literal["F", "B", "I", "W"]
FORWARD: ActionKind = "F"
BACKWARD: ActionKind = "B"
INPUT: ActionKind = "I"
WEIGHT: ActionKind = "W"


class Action(NamedTuple):
    """One forward or backward of one micro batch in one chunk; `chunk` counts in model order.

    kind: F: forward; B: whole backward; I, W: the two halves of a split backward, the gradients of the input and of the
        weights.
    """

    kind: ActionKind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro batch {self.micro_batch} in chunk {self.chunk}"


# (stage, stages, micro batches, chunks per stage) -> the actions of the stage, first to last.
Order = Callable[[int, int, int, int], tuple[Action, ...]]


@dataclass(frozen=True)
class Schedule:
    """A schedule and the numbers of chunks and micro batches that it runs.

    name: its name in `parallel.schedule`.
    splits_backward: some backwards are split into I and, later, W. v_shaped: see PipelineSplit.
    only_chunks: the only number of chunks per stage that it runs; None: any number.
    least_micro_batches: the least number of micro batches, per stage.
    whole_rounds: it runs the micro batches in M // stages rounds of equal size.
    keeps_all: it runs all forwards first, and keeps the activations of every micro batch.
    """

    name: str
    order: Order
    splits_backward: bool = False
    v_shaped: bool = False
    only_chunks: int | None = None
    least_micro_batches: int = 0
    whole_rounds: bool = False
    keeps_all: bool = False

    @property
    def default_chunks(self) -> int:
        """The number of chunks per stage where the user gives none."""
        return self.only_chunks or 2

    def takes_chunks(self, chunks: int) -> bool:
        """Return whether the schedule runs with this number of chunks per stage."""
        return chunks == self.only_chunks if self.only_chunks else chunks >= 1

    def problem(self, stages: int, micro_batches: int, chunks: int) -> str | None:
        """Return why the schedule does not run with these numbers, or None if it runs."""
        if not self.takes_chunks(chunks):
            return f"{self.name} runs {counted(self.only_chunks or 1, 'chunk')} per stage, not {chunks}"
        batches = counted(micro_batches, "micro batch")
        least = self.least_micro_batches * stages
        if micro_batches < least:
            verb = "is" if micro_batches == 1 else "are"
            return f"{batches} {verb} fewer than the {least} that {self.name} needs for {stages} stages"
        rounds = _rounds(stages, micro_batches)
        if self.whole_rounds and micro_batches % rounds:
            return f"{batches} do not make {rounds} equal rounds, as {self.name} needs for {stages} stages"
        return None

    def nearest_micro_batches(self, stages: int, micro_batches: int, chunks: int) -> int:
        """Return the least number of micro batches, `micro_batches` or more, that the schedule runs.

        Raises ValueError for a number of chunks that it does not run with.
        """
        if not self.takes_chunks(chunks):
            raise ValueError(self.problem(stages, micro_batches, chunks))
        enough = max(micro_batches, self.least_micro_batches * stages)
        if not self.whole_rounds:
            return enough
        rounds = _rounds(stages, enough)
        # Either larger rounds of the same number, or one more round of `stages` micro batches.
        return min(-(-enough // rounds) * rounds, (rounds + 1) * stages)

    def repeating_micro_batches(self, stages: int, micro_batches: int) -> int:
        """Return fewer micro batches, under four rounds, that fill and drain the pipeline as `micro_batches` do.

        The rounds that are left out repeat a steady state: they idle no stage, and without `keeps_all` every state of
        the activations in memory stands in the rounds that remain. The tests compare this with whole orders.
        """
        rounds = _rounds(stages, micro_batches)
        if rounds <= _FILL_STEADY_DRAIN:
            return micro_batches
        if self.whole_rounds:
            return micro_batches // rounds * _FILL_STEADY_DRAIN
        return micro_batches - (rounds - _FILL_STEADY_DRAIN) * stages


_FILL_STEADY_DRAIN = 3  # rounds


def _rounds(stages: int, micro_batches: int) -> int:
    return max(1, micro_batches // stages)


def gpipe_order(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Action, ...]:
    """All forwards, then all backwards; holds the activations of all micro batches (Huang et al. 2019, "GPipe")."""
    forwards = _actions(FORWARD, [stage], range(micro_batches))
    return (*forwards, *_actions(BACKWARD, [stage], range(micro_batches)))


def one_f_one_b_order(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Action, ...]:
    """Warm-up forwards, then one forward and one backward in turn.

    A stage holds the activations of at most `stages - stage` micro batches. Narayanan et al. 2019, "PipeDream";
    2021, as "PipeDream-Flush".
    """
    forwards = _actions(FORWARD, [stage], range(micro_batches))
    backwards = _actions(BACKWARD, [stage], range(micro_batches))
    return tuple(_by_turns(forwards, backwards, warm_up=stages - stage - 1))


def looped_bfs_order(stage: int, stages: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    """GPipe over several chunks per stage: all forwards chunk by chunk, then all backwards in reverse.

    Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism".
    """
    looped = _looped(stage, stages, chunks)
    forwards = _actions(FORWARD, looped, range(micro_batches))
    return (*forwards, *_actions(BACKWARD, looped[::-1], range(micro_batches)[::-1]))


def interleaved_1f1b_order(stage: int, stages: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    """1F1B over several chunks per stage; a round of about `stages` micro batches passes all chunks before the next.

    The bubble shrinks by the number of chunks, and the transfers grow by it. Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
    """
    looped, a_round = _looped(stage, stages, chunks), micro_batches // _rounds(stages, micro_batches)
    # Each stage further from the last one gets its first backward two actions later: one down, one up.
    warm_up = (chunks - 1) * a_round + 2 * (stages - 1 - stage)
    return tuple(
        _by_turns(
            _in_rounds(FORWARD, looped, micro_batches, a_round),
            _in_rounds(BACKWARD, looped[::-1], micro_batches, a_round),
            warm_up,
        )
    )


def interleaved_zero_bubble_order(
    stage: int, stages: int, micro_batches: int, chunks: int
) -> tuple[Action, ...]:
    """Interleaved 1F1B that delays each W by `stage` backwards, to fill the bubble at the end.

    With one chunk per stage this is ZB-H1, in which every stage holds as many activations as the first stage of 1F1B.
    Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
    """
    looped, a_round = _looped(stage, stages, chunks), micro_batches // _rounds(stages, micro_batches)
    turns = _by_turns(
        _in_rounds(FORWARD, looped, micro_batches, a_round),
        _in_rounds(INPUT, looped[::-1], micro_batches, a_round),
        warm_up=(chunks - 1) * a_round + stages - 1 - stage,
    )
    actions: list[Action] = []
    pending: list[Action] = []
    for action in turns:
        actions.append(action)
        if action.kind == INPUT:
            pending.append(Action(WEIGHT, action.chunk, action.micro_batch))
            if len(pending) > stage:
                actions.append(pending.pop(0))
    return (*actions, *pending)


def zbv_order(stage: int, stages: int, micro_batches: int, chunks: int = 2) -> tuple[Action, ...]:
    """Two chunks per stage, down the stages and up again; no bubble where F, I and W take equally long.

    Each stage holds the activations of at most 2 * stages chunks, as many as the first stage of 1F1B. Micro batches
    that do not fill the pipeline run as the first ones of a full pipeline.
    Qi et al. 2024, "Pipeline Parallelism with Controllable Memory".
    """
    down, up = stage, 2 * stages - 1 - stage
    filling = max(2 * stages - 1, micro_batches)
    early = 2 * stages - 1 - stage  # forwards that go down before the first backward comes up
    back_down: _Steps = [(INPUT, down), (WEIGHT, down)]
    up_and_back: _Steps = [(FORWARD, up), (INPUT, up), (WEIGHT, up)]
    steps: _Steps = [
        *[(FORWARD, down)] * (early - stage),
        *[(FORWARD, up), (FORWARD, down)] * stage,
        *up_and_back * (stages - stage),
        *[(FORWARD, down), *back_down, *up_and_back] * (filling - early),
        *[*back_down, *up_and_back] * (early - stages),
        *[(INPUT, down), (INPUT, up)] * stage,
        *back_down * (stages - stage),
        *[(WEIGHT, up)] * stage,
        *[(WEIGHT, down)] * stage,
    ]
    return tuple(action for action in _numbered(steps) if action.micro_batch < micro_batches)


def dualpipev_order(stage: int, stages: int, micro_batches: int, chunks: int = 2) -> tuple[Action, ...]:
    """DualPipe on half the stages: each forward of one chunk is paired with a backward of the other, to overlap them.

    The two of a pair run in sequence, F first, as torch runs them. Only the backwards during fill and drain
    are split. DeepSeek-AI 2024, "DeepSeek-V3 Technical Report"; the half version is by Sea AI Lab.
    """
    down, up = stage, 2 * stages - 1 - stage
    below = stages - 1 - stage
    both_ways: _Steps = [(FORWARD, down), (BACKWARD, up), (FORWARD, up), (BACKWARD, down)]
    last: list[int] = [up, down] * (stage + 1)
    steps: _Steps = [
        *[(FORWARD, down)] * (2 * below),
        *[(FORWARD, down), (FORWARD, up)] * (stage + 1),
        *[(INPUT, up), (WEIGHT, None), (FORWARD, up)] * below,
        *both_ways * (micro_batches - 2 * stages + stage + 1),
        *both_ways[1:] * below,
        *[(BACKWARD, chunk) for chunk in last[: stage + 1]],
        *[(INPUT, chunk) for chunk in last[stage + 1 :]],
        *[(WEIGHT, None), (INPUT, down)] * below,
        *[(WEIGHT, None)] * (stage + 1),
    ]
    return tuple(_numbered(steps))


# (kind, chunk) in order; `_numbered` adds the micro batches.
_Steps = list[tuple[ActionKind, int | None]]


def _numbered(steps: _Steps) -> Iterator[Action]:
    """Number the micro batches: the n-th forward or backward of a chunk is of micro batch n.

    W pairs with the oldest unmatched I of its chunk (of any chunk if None).
    """
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    pending: list[Action] = []
    for kind, chunk in steps:
        if kind == WEIGHT:
            oldest = next(each for each in pending if chunk in (None, each.chunk))
            pending.remove(oldest)
            yield Action(WEIGHT, oldest.chunk, oldest.micro_batch)
            continue
        assert chunk is not None
        counter = forwards if kind == FORWARD else backwards
        action = Action(kind, chunk, counter.setdefault(chunk, 0))
        counter[chunk] += 1
        if kind == INPUT:
            pending.append(action)
        yield action


def _looped(stage: int, stages: int, chunks: int) -> range:
    return range(stage, stage + stages * chunks, stages)


def _actions(kind: ActionKind, chunks: Iterable[int], micro_batches: Iterable[int]) -> Iterator[Action]:
    micro_batches = tuple(micro_batches)
    return (Action(kind, chunk, micro_batch) for chunk in chunks for micro_batch in micro_batches)


def _in_rounds(kind: ActionKind, chunks: Sequence[int], micro_batches: int, a_round: int) -> Iterator[Action]:
    for start in range(0, micro_batches, a_round):
        yield from _actions(kind, chunks, range(start, start + a_round))


def _by_turns(forwards: Iterable[Action], backwards: Iterable[Action], warm_up: int) -> Iterator[Action]:
    """Yield `warm_up` forwards, then a forward and a backward in turn, then the remaining backwards."""
    forwards, backwards = iter(forwards), iter(backwards)
    yield from islice(forwards, warm_up)
    for action in forwards:
        yield action
        yield next(backwards)
    yield from backwards


_EVERY = (
    Schedule("1f1b", one_f_one_b_order, only_chunks=1, least_micro_batches=1),
    Schedule("gpipe", gpipe_order, only_chunks=1, keeps_all=True),
    Schedule("interleaved_1f1b", interleaved_1f1b_order, whole_rounds=True),
    Schedule("looped_bfs", looped_bfs_order, keeps_all=True),
    Schedule(
        "interleaved_zero_bubble", interleaved_zero_bubble_order, splits_backward=True, whole_rounds=True
    ),
    Schedule("zbv", zbv_order, splits_backward=True, v_shaped=True, only_chunks=2),
    Schedule(
        "dualpipev",
        dualpipev_order,
        splits_backward=True,
        v_shaped=True,
        only_chunks=2,
        least_micro_batches=2,
    ),
)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _EVERY}
