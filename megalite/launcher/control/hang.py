"""Notices that a job hangs, and names the ranks that the others wait for, from the marks of all ranks."""

import faulthandler
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megalite.launcher.control.messages import counted_ranks
from megalite.launcher.control.progress import Activity, RankMarks
from megalite.topology.axes import Layout
from megalite.topology.place import RankPlace

_STEPS_BEFORE = 3  # the first steps compile, and measure
_STEPS_KEPT = 20
_PAUSED_SECONDS = 5.0  # between two looks: the whole job was stopped for a while, and goes on
_LONGER = {Activity.SAVING.value: 6.0, Activity.VALIDATING.value: 6.0}
_COMPUTING = {
    each.value
    for each in (
        *(Activity.FORWARD_BACKWARD, Activity.REDUCING, Activity.TOTALLING),
        *(Activity.UPDATING, Activity.COMPARING),
    )
}
_WATCHED = _COMPUTING | {
    each.value
    for each in (Activity.READING_BATCH, Activity.BETWEEN_STEPS, Activity.VALIDATING, Activity.SAVING)
}
# Stages send and receive in pairs, which no count compares.
_IN_PAIRS, _WORLD = {"pp"}, "world"
_ENDS_AFTER = 5  # times the patience
_OF_COLLECTIVES = 0.5  # of launch.collective_seconds, after which the ranks that wait would fail
_NAMED = 4
_LONGEST_STACKS = 100_000
_FRAMES = 3
_LIBRARY = re.compile(r"/python3[^/]*/(?!site-packages/)")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class HangPolicy:
    """When a job counts as hanging, and what follows.

    seconds: without a mark, beyond twice the median step; then the report is said, once for each hang. stops: the job
    ends with the report after five times as long, and after half of collective_seconds at the latest; not before that
    where the ranks that are waited for read, save, validate or are between two steps, as in a callback.
    """

    seconds: float
    stops: bool
    collective_seconds: float = 1800.0


@dataclass(frozen=True)
class Hang:
    """A job in which no rank moves.

    seconds: for so long. patience: after so long it counts as a hang. suspects: the ranks that the others wait for;
    all ranks where none stands out. mute: those of which nothing is heard, and why. marks: of each rank, by rank.
    """

    seconds: float
    patience: float
    suspects: Sequence[int]
    mute: Mapping[int, str]
    marks: Mapping[int, RankMarks]

    def ends(self, policy: HangPolicy) -> bool:
        """Whether it has lasted so long that the job ends for it: never where no rank waits for another."""
        if not policy.stops or all(each.waits_over is None for each in self.marks.values()):
            return False
        doing = {self.marks[rank].phase for rank in self.suspects if rank not in self.mute}
        latest = _OF_COLLECTIVES * policy.collective_seconds
        last = min(_ENDS_AFTER * self.patience, latest) if doing <= _COMPUTING else latest
        return self.seconds >= max(self.patience, last)

    @property
    def step(self) -> int:
        """The step that does not end; that after which it hangs between two steps."""
        return max(marks.step or 0 for marks in self.marks.values()) + 1

    def describe(self, layout: Layout, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> str:
        """Return the report: which ranks are waited for, what each does and where, and what the others do.

        hosts: rank -> host. stacks: rank -> its stack as faulthandler writes it.
        """
        lines = [f"step {self.step} hangs: no rank has moved for {self.seconds:.0f} s (monitor.hang_seconds)"]
        for rank in self.suspects[:_NAMED]:
            doing = self.mute.get(rank) or self._doing(rank)
            lines.append(f"{layout.describe(rank)} on {hosts.get(rank, 'this host')}: {doing}")
            lines += [f"  at {frame}" for frame in frames_of(stacks.get(rank, ""))]
        if len(self.suspects) > _NAMED:
            lines.append(f"{len(self.suspects) - _NAMED} more ranks like these")
        waiting: dict[str, list[int]] = {}
        suspected = set(self.suspects)
        for rank, marks in self.marks.items():
            if rank not in suspected:
                waiting.setdefault(marks.doing, []).append(rank)
        lines += [f"{counted_ranks(ranks)}: {doing}" for doing, ranks in waiting.items()]
        return "\n  ".join(lines)

    def _doing(self, rank: int) -> str:
        marks = self.marks[rank]
        alone = marks.waits_over is None and len(self.suspects) == 1
        return f"{marks.doing}; the others wait for it" if alone else marks.doing


class HangWatch:
    """Compares the marks of all ranks from look to look; a rank moves when a mark of its changes.

    A job hangs when no rank has moved for twice the median step and `hang_seconds`; six times as long while a rank
    saves or validates, and never before the third step of this start, nor in an export, an upload or around a profile.
    """

    def __init__(self, layout: Layout, hang_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._layout, self._hang_seconds, self._clock = layout, hang_seconds, clock
        self._marks: dict[int, RankMarks] = {}
        self._moved_at = self._stepped_at = self._looked_at = clock()
        self._seconds: deque[float] = deque(maxlen=_STEPS_KEPT)
        # Found once for all looks at a hang.
        self._suspects: Sequence[int] | None = None

    def see(self, rank: int, marks: RankMarks) -> None:
        """Take the marks of a rank of this moment. Steps are timed by rank 0."""
        before = self._marks.get(rank)
        if marks == before:
            return
        now = self._moved_at = self._clock()
        self._marks[rank], self._suspects = marks, None
        if rank > 0:
            return
        steps = marks.steps - (before.steps if before else 0)
        if steps > 0:
            # News may come for several steps at once, and for the first ones with what was before them.
            self._seconds += [(now - self._stepped_at) / steps] * min(steps, _STEPS_KEPT)
        if steps > 0 or not marks.steps:
            self._stepped_at = now

    def look(self, mute: Mapping[int, str]) -> Hang | None:
        """Return the hang, if the job hangs at this moment; called often.

        mute: rank -> why nothing is heard of it. Where that are all, the job is suspended.
        """
        now = self._clock()
        if now - self._looked_at > _PAUSED_SECONDS or len(mute) == self._layout.world_size:
            self._moved_at = now
        hang = self._hang(now, mute) if len(self._marks) == self._layout.world_size else None
        self._looked_at = self._clock()
        return hang

    def _hang(self, now: float, mute: Mapping[int, str]) -> Hang | None:
        # The last mark of a mute rank may be old.
        phases = {each.phase for rank, each in self._marks.items() if rank not in mute}
        if self._marks[0].steps < _STEPS_BEFORE or not phases <= _WATCHED:
            return None
        patience = self._hang_seconds + 2 * median(self._seconds)
        patience *= max((_LONGER.get(phase, 1.0) for phase in phases), default=1.0)
        idle = now - self._moved_at
        if idle < patience:
            return None
        if self._suspects is None:
            self._suspects = suspects(self._marks, self._layout)
        return Hang(idle, patience, sorted(mute) or self._suspects, mute, dict(self._marks))


def suspects(marks: Mapping[int, RankMarks], layout: Layout) -> list[int]:
    """Return the ranks that the others wait for: those behind in a collective that do not wait themselves.

    Where there is none: those that do not wait, else those that are behind, else those in the rarest collective, since
    all wait in different ones; else all.
    """
    busy = {rank for rank, each in marks.items() if each.waits_over is None}
    behind = _behind(marks, layout)
    places = Counter(each.collective for each in marks.values())
    fewest = min(places.values())
    rarest = {rank for rank, each in marks.items() if places[each.collective] == fewest}
    for group in (busy & behind, busy, behind, rarest):
        if group and group != set(marks):
            return sorted(group)
    return sorted(marks)


def _behind(marks: Mapping[int, RankMarks], layout: Layout) -> set[int]:
    """Return the ranks that have begun fewer collectives in a group than another rank of it."""
    behind = set[int]()
    for role in {role for each in marks.values() for role in each.counts} - _IN_PAIRS:
        seen = set[int]()
        for rank in marks:
            if rank in seen:
                continue
            group = marks if role == _WORLD else RankPlace(layout, rank).peers.get(role, (rank,))
            seen.update(group)
            counts = {peer: marks[peer].counts.get(role, 0) for peer in group if peer in marks}
            most = max(counts.values())
            behind |= {peer for peer, count in counts.items() if count < most}
    return behind


def own_stacks() -> str:
    """Return the stacks of all threads of this process, as faulthandler writes them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()[:_LONGEST_STACKS]


def frames_of(stack: str) -> list[str]:
    """Return the innermost frames of the main thread, "file:line in function", in a stack that faulthandler wrote.

    Frames of Python's own library are left out. Where the main thread waits for a thread, those of a busy one follow.
    """
    # The current thread is the one that wrote the stacks.
    written = re.split(r"^(Current thread|Thread) .*$", stack, flags=re.MULTILINE)[1:]
    threads = [
        [f"{file}:{line} in {name}" for file, line, name in _FRAME.findall(thread)]
        for title, thread in zip(written[::2], written[1::2], strict=True)
        if title == "Thread"
    ]
    if not threads:
        return []
    *others, main = threads  # the main thread was made first, and comes last
    busy = [thread for thread in others if thread and not _LIBRARY.search(thread[0])]
    shown = _own(main)
    if main and _LIBRARY.search(main[0]) and busy:
        shown += [f"{frame} (another thread)" for frame in _own(busy[0])[:1]]
    return shown


def _own(frames: Sequence[str]) -> list[str]:
    return [frame for frame in frames if not _LIBRARY.search(frame)][:_FRAMES]
