"""The coordinator's watch for a hang of its ranks: it asks the ranks that the others wait for where they are."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megalite.launcher.control.connection import alive_seconds
from megalite.launcher.control.hang import Hang, HangPolicy, HangWatch
from megalite.launcher.control.messages import Verdict
from megalite.launcher.control.progress import RankMarks
from megalite.launcher.control.rank_states import RankState, unheard_of
from megalite.topology.axes import Layout

_ANSWER_SECONDS = 2.0
_ASKED = 8
_BEATS_MISSED = 3
_UNHEARD = "does not answer: stopped, busy outside of Python, or its host is gone"


class CoordinatedHangs:
    """The watch over the ranks of a coordinated job."""

    def __init__(self, policy: HangPolicy, layout: Layout):
        self.policy, self._layout = policy, layout
        self._watch = HangWatch(layout, policy.seconds)
        self._hang: Hang | None = None
        self._stacks: dict[int, str] = {}
        self._asked: Sequence[int] = ()
        self._report_at: float | None = None
        self._ends = False

    @classmethod
    def of(cls, policy: HangPolicy | None, layout: Layout | None) -> "CoordinatedHangs | None":
        """Return the watch, None where there is no policy, or the layout is not known."""
        return None if policy is None or layout is None else cls(policy, layout)

    def see(self, rank: int, marks: Mapping[str, Any]) -> None:
        """Take the marks that a rank has sent."""
        if (known := RankMarks.from_dict(marks)) is not None:
            self._watch.see(rank, known)

    def to_ask(self, states: Mapping[int, RankState]) -> Sequence[int]:
        """Return the ranks to ask for their stacks: when a hang begins to count as one, and when the job ends."""
        unheard = unheard_of(states, _BEATS_MISSED * alive_seconds(self._layout.world_size))
        hang, before = self._watch.look(dict.fromkeys(unheard, _UNHEARD)), self._hang
        self._hang = hang
        if hang is None:
            self._report_at = None
            return ()
        ends = hang.ends(self.policy)
        if before is not None and (not ends or self._ends):
            return ()
        self._ends, self._stacks = ends, {}
        self._asked = [rank for rank in hang.suspects if rank not in hang.mute][:_ASKED]
        self._report_at = time.monotonic() + _ANSWER_SECONDS
        return self._asked

    def answered(self, rank: int, stack: str) -> None:
        """Take the stacks of a rank that was asked."""
        self._stacks[rank] = stack

    def outcome(self, states: Mapping[int, RankState]) -> Verdict | str | None:
        """Return the report for the user, or the verdict that ends the job, once the asked ranks have had their time.

        No rank is at fault where several are waited for.
        """
        if self._hang is None or self._report_at is None:
            return None
        silent = set(self._asked) - self._stacks.keys()
        if silent and time.monotonic() < self._report_at:
            return None
        self._report_at = None
        hang = replace(self._hang, mute={**self._hang.mute, **dict.fromkeys(silent, _UNHEARD)})
        hosts = {rank: state.host for rank, state in states.items()}
        report = hang.describe(self._layout, hosts, self._stacks)
        if not self._ends:
            return report
        rank = hang.suspects[0] if len(hang.suspects) == 1 else -1
        return Verdict(report, 1, rank, hosts.get(rank, ""))
