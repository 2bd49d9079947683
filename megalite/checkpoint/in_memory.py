"""Copies of a run's state in the memory of its hosts, which survive the death of its ranks.

For each copied step a rank writes its file of a checkpoint, and behind it a note on it, to a folder of /dev/shm; both
go to a rank of the next host too. A copy counts once the hosts together have the notes and files of all ranks of one
start: a torn one lacks some. The hashes in the notes show altered bytes when a copy is read.
"""

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.manifest_json import from_json, to_json
from megalite.checkpoint.unpublished import Draft, merged_tables
from megalite.errors import CheckpointError
from megalite.parallel.host_ring import HostRing

_FIRST_NOTE = "rank-00000.json"


class MemoryDraft(Draft):
    """A copy in the making: `write` writes this rank's file and note, and has the next host keep them."""

    def __init__(self, start: str, ring: HostRing | None, *draft: Any):
        """start: a text that no other start of the run has. draft: what a Draft is made of."""
        super().__init__(*draft)
        self._start, self._ring = start, ring

    def write(self, read: Callable[[str], Tensor]) -> str:
        """As of a draft, to shared memory. Raises CheckpointError."""
        tables, failures = list[str](), list[Exception]()

        # The next host waits for this rank's words, whatever happens.
        def attempt(action: Callable[[], object]) -> None:
            try:
                action()
            except Exception as error:
                failures.append(error)

        attempt(lambda: self.partial.mkdir(exist_ok=True))
        attempt(lambda: tables.append(super(MemoryDraft, self).write(read)))
        attempt(lambda: self._pass_on(self.path, failures))
        note = self.path.with_suffix(".json")
        if not failures:
            attempt(lambda: self._write_note(note, tables[0]))
        attempt(lambda: self._pass_on(note, failures))
        if failures:
            full = isinstance(failures[0], OSError) and failures[0].errno == errno.ENOSPC
            remedy = "; enlarge it (docker --shm-size, mount -o remount,size=)" if full else ""
            raise CheckpointError(f"{self.path}: {failures[0]}{remedy}") from failures[0]
        return ""

    def publish(self, tables: Sequence[str]) -> None:
        """Do nothing: the notes say that the copy is whole."""

    def _pass_on(self, file: Path, failures: Sequence[Exception]) -> None:
        if self._ring is not None:
            others = [self.partial / f"rank-{source:05d}{file.suffix}" for source in self._ring.sources]
            self._ring.pass_on(file if file.exists() and not failures else None, others)

    def _write_note(self, path: Path, table: str) -> None:
        of_rank_0 = path.name == _FIRST_NOTE
        note = {
            "step": self.step,
            "start": self._start,
            "ranks": self._manifest.layout.world_size,
            "table": table,
            # That of rank 0 alone has the position in streamed text.
            "manifest": to_json(self._manifest) if of_rank_0 else None,
        }
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(json.dumps(note))
        unfinished.rename(path)


@dataclass(frozen=True)
class WholeCopy:
    """A copy that the hosts have together. holders: file -> a rank of each host that has it."""

    manifest: Manifest
    holders: Mapping[str, Sequence[int]]


def whole_copies(found: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[WholeCopy]:
    """Yield the whole copies, newest first. found: a rank of each host -> `CopiesFolder.notes` there.

    A copy with a damaged note is not whole.
    """
    starts: dict[tuple[int, str], dict[int, Mapping[str, Any]]] = {}
    holders: dict[tuple[int, str], dict[str, list[int]]] = {}
    for holder, notes in found.items():
        for note in notes:
            of, name = (note["step"], note["start"]), json.loads(note["table"])[0]
            starts.setdefault(of, {})[int(name[len("rank-") :].split(".")[0])] = note
            holders.setdefault(of, {}).setdefault(name, []).append(holder)
    for of in sorted(starts, reverse=True):
        notes_of = starts[of]
        first = notes_of.get(0)
        if first is not None and sorted(notes_of) == list(range(first["ranks"])):
            tables = [notes_of[rank]["table"] for rank in sorted(notes_of)]
            with suppress(CheckpointError):
                written = from_json(first["manifest"].splitlines(keepends=True), Path(_FIRST_NOTE))
                yield WholeCopy(replace(written, **merged_tables(tables)), holders[of])
