"""Each pipeline schedule as data: its rules and each stage's order of actions. No torch, no process.

torch.distributed.pipelining runs them (parallel/pipeline.py); these orders are what it then does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

ActionKind = Literal["F", "B", "I", "W"]
FORWARD: ActionKind = "F"
BACKWARD: ActionKind = "B"
INPUT: ActionKind = "I"
WEIGHT: ActionKind = "W"


class Action(NamedTuple):
    """What a stage does with one micro batch in one of its chunks, named by the chunk's place in model order.

    F forward; B backward; or, where the schedule splits it, I the input's gradient and W the weights'.
    """

    kind: ActionKind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro batch {self.micro_batch} in chunk {self.chunk}"


# (stage, stages, micro batches, chunks a stage) -> what the stage does, first to last.
Order = Callable[[int, int, int, int], tuple[Action, ...]]


@dataclass(frozen=True)
class Schedule:
    """A schedule by its name in `parallel.schedule`.

    splits_backward: some backwards are I and, later, W. v_shaped: as of PipelineSplit.
    only_chunks: the one number of chunks a stage that it runs; None: any.
    """

    name: str
    description: str
    paper: str
    order: Order
    splits_backward: bool = False
    v_shaped: bool = False
    only_chunks: int | None = None
    least_micro_batches: int = 0
    """A stage."""
    whole_rounds: bool = False
    """The micro batches are run in M // stages rounds of equal size."""

    @property
    def default_chunks(self) -> int:
        return self.only_chunks or 2

    def takes_chunks(self, chunks: int) -> bool:
        """Whether it runs with so many chunks a stage."""
        return chunks == self.only_chunks if self.only_chunks else chunks >= 1

    def problem(self, stages: int, micro_batches: int, chunks: int) -> str | None:
        """None where it runs, else the reason why not."""
        if not self.takes_chunks(chunks):
            verb = "is" if chunks == 1 else "are"
            return (
                f"{_counted(chunks, 'chunk')} a stage {verb} not the {self.only_chunks} that {self.name} runs"
            )
        given = _counted(micro_batches, "micro batch", "es")
        least = self.least_micro_batches * stages
        if micro_batches < least:
            verb = "is" if micro_batches == 1 else "are"
            return f"{given} {verb} fewer than the {least} that {self.name} needs for {stages} stages"
        rounds = _rounds(stages, micro_batches)
        if self.whole_rounds and micro_batches % rounds:
            return f"{given} do not make {rounds} equal rounds, as {self.name} needs for {stages} stages"
        return None

    def nearest_micro_batches(self, stages: int, micro_batches: int, chunks: int) -> int:
        """The least number of micro batches from `micro_batches` on that it runs.

        Raises ValueError where no number would do, for the chunks are wrong.
        """
        if not self.takes_chunks(chunks):
            raise ValueError(self.problem(stages, micro_batches, chunks))
        enough = max(micro_batches, self.least_micro_batches * stages)
        if not self.whole_rounds:
            return enough
        rounds = _rounds(stages, enough)
        # As many rounds of a few more, or, at the latest, one round more of as many as there are stages.
        return min(-(-enough // rounds) * rounds, (rounds + 1) * stages)


def _rounds(stages: int, micro_batches: int) -> int:
    return max(1, micro_batches // stages)


def _counted(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural * (number != 1)}"


def gpipe_order(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Action, ...]:
    """All forwards, then all backwards: keeps every micro batch's activations alive."""
    forwards = _actions(FORWARD, [stage], range(micro_batches))
    return (*forwards, *_actions(BACKWARD, [stage], range(micro_batches)))


def one_f_one_b_order(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Action, ...]:
    """Warm up, then one forward and one backward by turns: at most `stages - stage` micro batches are alive."""
    forwards = _actions(FORWARD, [stage], range(micro_batches))
    backwards = _actions(BACKWARD, [stage], range(micro_batches))
    return tuple(_by_turns(forwards, backwards, warm_up=stages - stage - 1))


def looped_bfs_order(stage: int, stages: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    """All forwards chunk by chunk, then all backwards the same way back."""
    held = _looped(stage, stages, chunks)
    forwards = _actions(FORWARD, held, range(micro_batches))
    return (*forwards, *_actions(BACKWARD, held[::-1], range(micro_batches)[::-1]))


def interleaved_1f1b_order(stage: int, stages: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    """1F1B over rounds of about as many micro batches as stages; a round passes every chunk before the next."""
    held, a_round = _looped(stage, stages, chunks), micro_batches // _rounds(stages, micro_batches)
    # A stage further from the end sees the first backward two actions later: one down, one up.
    warm_up = (chunks - 1) * a_round + 2 * (stages - 1 - stage)
    return tuple(
        _by_turns(
            _in_rounds(FORWARD, held, micro_batches, a_round),
            _in_rounds(BACKWARD, held[::-1], micro_batches, a_round),
            warm_up,
        )
    )


def interleaved_zero_bubble_order(
    stage: int, stages: int, micro_batches: int, chunks: int
) -> tuple[Action, ...]:
    """Interleaved 1F1B that holds each W back by `stage` backwards, to fill the wait at the end with them.

    With one chunk it is ZB-H1: every stage holds what the first one does under 1F1B.
    """
    held, a_round = _looped(stage, stages, chunks), micro_batches // _rounds(stages, micro_batches)
    turns = _by_turns(
        _in_rounds(FORWARD, held, micro_batches, a_round),
        _in_rounds(INPUT, held[::-1], micro_batches, a_round),
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
    """Down the stages and up again: where F, I and W take equally long, no stage waits once it has begun.

    At most 2 * stages chunks' activations are alive on every stage, as much as on the first one under 1F1B.
    Micro batches too few to fill the pipeline are run as the first ones of so many that do.
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
    """DualPipe cut in half: a forward of one chunk is paired with a backward of the other, to overlap them.

    torch runs such a pair one after the other, F first, and so it stands here. The backward is split only where
    the pipeline fills and drains.
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


# A chunk's kinds of action in a row; their micro batches are numbered as they come.
_Steps = list[tuple[ActionKind, int | None]]


def _numbered(steps: _Steps) -> Iterator[Action]:
    """Each chunk's forwards and backwards count up; W is of its chunk's oldest I without one, None: of any chunk's."""
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    pending: list[Action] = []
    for kind, chunk in steps:
        if kind == WEIGHT:
            of = next(each for each in pending if chunk in (None, each.chunk))
            pending.remove(of)
            yield Action(WEIGHT, of.chunk, of.micro_batch)
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


def _actions(kind: ActionKind, held: Iterable[int], micro_batches: Iterable[int]) -> Iterator[Action]:
    micro_batches = tuple(micro_batches)
    return (Action(kind, chunk, micro_batch) for chunk in held for micro_batch in micro_batches)


def _in_rounds(kind: ActionKind, held: Sequence[int], micro_batches: int, a_round: int) -> Iterator[Action]:
    for start in range(0, micro_batches, a_round):
        yield from _actions(kind, held, range(start, start + a_round))


def _by_turns(forwards: Iterable[Action], backwards: Iterable[Action], warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then a forward and a backward by turns, then the backwards that are left."""
    forwards, backwards = iter(forwards), iter(backwards)
    yield from islice(forwards, warm_up)
    for action in forwards:
        yield action
        yield next(backwards)
    yield from backwards


_EVERY = (
    Schedule(
        "1f1b",
        "one forward and one backward by turns; few activations",
        "Narayanan et al. 2019, PipeDream; 2021 as PipeDream-Flush",
        one_f_one_b_order,
        only_chunks=1,
        least_micro_batches=1,
    ),
    Schedule(
        "gpipe",
        "all forwards, then all backwards; takes any number of micro batches, and keeps all their activations",
        "Huang et al. 2019, GPipe",
        gpipe_order,
        only_chunks=1,
    ),
    Schedule(
        "interleaved_1f1b",
        "1F1B over several chunks a stage: the bubble shrinks by their number, transfers grow by it",
        "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
        interleaved_1f1b_order,
        whole_rounds=True,
    ),
    Schedule(
        "looped_bfs",
        "GPipe over several chunks a stage; takes any number of micro batches",
        "Lamy-Poirier 2023, Breadth-First Pipeline Parallelism",
        looped_bfs_order,
    ),
    Schedule(
        "interleaved_zero_bubble",
        "interleaved 1F1B with weight gradients put off into the bubble",
        "Qi et al. 2023, Zero Bubble Pipeline Parallelism",
        interleaved_zero_bubble_order,
        splits_backward=True,
        whole_rounds=True,
    ),
    Schedule(
        "zbv",
        "two chunks a stage, down and up again, weight gradients put off: nearly no bubble in the memory of 1F1B",
        "Qi et al. 2024, Pipeline Parallelism with Controllable Memory",
        zbv_order,
        splits_backward=True,
        v_shaped=True,
        only_chunks=2,
    ),
    Schedule(
        "dualpipev",
        "two chunks a stage, down and up again, forwards beside backwards",
        "DeepSeek-AI 2024, DeepSeek-V3 Technical Report; cut in half by Sea AI Lab",
        dualpipev_order,
        splits_backward=True,
        v_shaped=True,
        only_chunks=2,
        least_micro_batches=2,
    ),
)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _EVERY}
