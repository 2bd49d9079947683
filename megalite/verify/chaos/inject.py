"""Do one fault to the processes and files of a job, from the outside and without their help. Linux, no torch."""

import ctypes
import os
import random
import resource
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.tensor_header import read_header
from megalite.errors import LaunchError

_PIDFD_GETFD = 438  # the same number on every processor; Python has no name for it
_ESTABLISHED = "01"
# A slow rank runs for its share of each such time.
_PULSE_SECONDS = 0.1


class PulsedRank:
    """Stops and continues a process many times a second, so that it has 1 / factor of its time; until `end`."""

    def __init__(self, process: int, factor: float):
        self._process, self._factor = process, factor
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._pulse, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the process run; it may have ended meanwhile."""
        self._over.set()
        self._thread.join()

    def _pulse(self) -> None:
        stopped = _PULSE_SECONDS * (1 - 1 / self._factor)
        try:
            while not self._over.wait(_PULSE_SECONDS - stopped):
                os.kill(self._process, signal.SIGSTOP)
                self._over.wait(stopped)
                os.kill(self._process, signal.SIGCONT)
        except ProcessLookupError:
            return


def fill_disk(ranks: Sequence[int]) -> None:
    """Let no file of these processes grow from now on, as if the disk were full (RLIMIT_FSIZE: EFBIG, not ENOSPC)."""
    for process in ranks:
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (0, hard))


def drop_link(ranks: Sequence[int], rank: int) -> str:
    """Shut down a TCP connection between a rank and another one; return which: "ranks 1 and 3".

    Raises LaunchError where the ranks have none, or the kernel does not let this process take it.
    """
    ends = {pair: other for other in range(len(ranks)) for _, pair in _connections(ranks[other])}
    for descriptor, (own, peer) in _connections(ranks[rank]):
        other = ends.get((peer, own))
        if other is not None and other != rank:
            with _taken(ranks[rank], descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            return f"ranks {min(rank, other)} and {max(rank, other)}"
    raise LaunchError(f"rank {rank} has no TCP connection with another rank, so that no link can be dropped")


def _connections(process: int) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield the descriptors of a process that are TCP connections, with (own address, peer's), as /proc has them."""
    table: dict[str, tuple[str, str]] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    table[f"socket:[{fields[9]}]"] = (fields[1], fields[2])
    with suppress(OSError):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                if (pair := table.get(str(entry.readlink()))) is not None:
                    yield int(entry.name), pair


def _taken(process: int, descriptor: int) -> socket.socket:
    """Return a socket of another process."""
    handle = os.pidfd_open(process)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        taken = libc.syscall(_PIDFD_GETFD, handle, descriptor, 0)
        if taken < 0:
            reason = os.strerror(ctypes.get_errno())
            raise LaunchError(
                f"the kernel does not let this process take a socket of process {process}: {reason}"
            )
        return socket.socket(fileno=taken)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class FlippedBit:
    """A bit of a tensor in a file of a checkpoint, which has changed."""

    file: Path
    tensor: str
    byte: int

    def __str__(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}, {self.tensor}, byte {self.byte}"


def flip_checkpoint_bit(checkpoint: Path, chance: random.Random) -> FlippedBit:
    """Flip one bit of one tensor in a checkpoint's files. Its size stays, so that only the hash tells."""
    files = sorted(read_manifest(checkpoint).files)
    path = checkpoint / chance.choice([name for name in files if name.endswith(".safetensors")])
    entries = {name: entry for name, entry in read_header(path).items() if entry.stop > entry.start}
    name = chance.choice(sorted(entries))
    place = chance.randrange(entries[name].start, entries[name].stop)
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return FlippedBit(path, name, place)
