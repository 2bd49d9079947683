"""Files between the memories of hosts: each rank sends its own to a rank of the next host, over gloo."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.mesh import ParallelMesh, ProcessGroup

_PIECE_BYTES = 1 << 24


def receiver_of(hosts: Sequence[str], rank: int) -> int:
    """Return the rank of the next host that keeps the files of `rank`. hosts: that of each rank, two or more."""
    names = list(dict.fromkeys(hosts))
    following = names[(names.index(hosts[rank]) + 1) % len(names)]
    there = [other for other, host in enumerate(hosts) if host == following]
    return there[hosts[:rank].count(hosts[rank]) % len(there)]


class HostRing:
    """The hosts of a job in a ring, with a process group of its own, so that a thread may use it. Collective to make.

    hosts: the host of each rank, two or more of them.
    """

    def __init__(self, hosts: Sequence[str], rank: int, seconds: float):
        self._target = receiver_of(hosts, rank)
        self.sources = [each for each in range(len(hosts)) if receiver_of(hosts, each) == rank]
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

    def pass_on(self, file: Path | None, received: Sequence[Path]) -> None:
        """Send a file to the next host, and write those of `sources` as `received`. Every rank calls it alike.

        file: None where this rank has none. Raises the OSError of a file that cannot be written once all have arrived,
        so that no other rank waits.
        """
        sending = _pieces(file)
        arriving = {source: _Arriving(path) for source, path in zip(self.sources, received, strict=True)}
        while True:
            piece = next(sending, None)
            sent = None if piece is None else dist.isend(piece, self._target, group=self._group)
            waiting = {source: each for source, each in arriving.items() if not each.complete}
            for source, each in waiting.items():
                each.take(source, self._group)
            if sent is not None:
                sent.wait()
            elif not waiting:
                break
        for each in arriving.values():
            if each.failure is not None:
                raise each.failure


def copy_to_rank(mesh: ParallelMesh, path: Path, source: int, target: int) -> None:
    """Copy a file of one rank's host to that of another, under the same path; the other ranks return at once."""
    if mesh.rank == source:
        for piece in _pieces(path if path.exists() else None):
            dist.send(piece, target, group=mesh.host)
    elif mesh.rank == target:
        arriving = _Arriving(path)
        while not arriving.complete:
            arriving.take(source, mesh.host)
        if arriving.failure is not None:
            raise arriving.failure


def _pieces(path: Path | None) -> Iterator[Tensor]:
    """Yield the size of a file, -1 for none, and its bytes."""
    size = -1 if path is None else path.stat().st_size
    yield torch.tensor([size])
    if path is None:
        return
    with path.open("rb") as file:
        for start in range(0, size, _PIECE_BYTES):
            yield torch.from_numpy(np.fromfile(file, np.uint8, min(_PIECE_BYTES, size - start)))


class _Arriving:
    """A file that arrives in pieces; it has its name once it is whole."""

    def __init__(self, path: Path):
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._left: int | None = None
        self._file: IO[bytes] | None = None
        self.complete = False
        self.failure: OSError | None = None

    def take(self, source: int, group: ProcessGroup | None) -> None:
        """Receive the size, or the next piece; one that cannot be written is received all the same."""
        piece = torch.zeros(1, dtype=torch.int64)
        if self._left is not None:
            piece = torch.empty(min(self._left, _PIECE_BYTES), dtype=torch.uint8)
        dist.recv(piece, source, group=group)
        first = self._left is None
        self._left = int(piece) if first else (self._left or 0) - piece.numel()
        self.complete = self._left <= 0
        if self._left < 0 or self.failure is not None:
            return
        try:
            self._keep(b"" if first else piece.numpy().tobytes())
        except OSError as error:
            self.failure = error
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def _keep(self, data: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._partial.open("wb")
        self._file.write(data)
        if self.complete:
            self._file.close()
            self._partial.rename(self._path)
