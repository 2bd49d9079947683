"""The sockets between ranks and coordinator: how a dead link is noticed, and how many a process may open."""

import errno
import resource
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from megalite.errors import LaunchError
from megalite.launcher.control.hang import HangPolicy

ALIVE_SECONDS = 2.0
"""The shortest time between two messages of a rank that it is alive."""
_PROBE_SECONDS = 5
_ALIVE_MESSAGES = 2000  # a second, of all ranks: the coordinator takes some 20 microseconds for each
_OTHER_FILES = 356


@dataclass(frozen=True)
class RendezvousLimits:
    """The times that `[launch]` sets, in seconds: for ranks to come, and for a host to answer.

    hangs: what follows when no rank moves; None: nobody watches.
    """

    rendezvous_seconds: float = 300.0
    heartbeat_seconds: float = 30.0
    hangs: HangPolicy | None = None


DEFAULT_LIMITS = RendezvousLimits()
# The begin of Linux's struct tcp_info, up to tcpi_last_ack_recv, in milliseconds.
_TCP_INFO = struct.Struct("8B13I")


def watch_link(connection: socket.socket, seconds: float) -> None:
    """Have the kernel end a connection whose other host does not answer for `seconds`, even one that is silent.

    The kernel answers for a process that is stopped or computes without Python, so such a process is not taken for a
    lost host.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    probe = _pause_of_probes(seconds)
    options = {
        "TCP_KEEPIDLE": probe,
        "TCP_KEEPINTVL": probe,
        "TCP_KEEPCNT": max(2, int(seconds / probe)),
        "TCP_USER_TIMEOUT": max(1000, int(seconds * 1000)),
    }
    for name, value in options.items():
        # macOS has other names; there the limit of the collectives notices the loss.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def host_answers(connection: socket.socket, seconds: float) -> bool | None:
    """Return whether the other host has answered lately; None where the kernel does not tell.

    seconds: as for `watch_link`, which has the kernel ask a silent host. Two questions without an answer are none.
    """
    try:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        return bool(_TCP_INFO.unpack(state)[-1] < 2000 * _pause_of_probes(seconds))
    except (AttributeError, OSError, struct.error):
        return None


def _pause_of_probes(seconds: float) -> int:
    return max(1, min(_PROBE_SECONDS, int(seconds / 3)))


def why_lost(error: OSError | None = None) -> str:
    """Return what the end of a connection says of the process at its other end; None: a plain end.

    A host that is there ends the connection of a dead process with an end or a reset; only the other errors mean that
    the host does not answer.
    """
    if error is None or error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "killed, out of memory, or its host is gone"
    return f"its host or the network to it is gone ({error.strerror or error})"


def owner_of_port(port: int) -> str:
    """Return "pid 12 (name)", the process of this user that listens at a port; "" if it cannot be seen."""
    import psutil  # type: ignore[import-untyped]

    # Only a help in a message: a sandbox may hide /proc.
    with suppress(psutil.Error, OSError, RuntimeError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def alive_seconds(world_size: int) -> float:
    """Return the time between two messages of a rank that it is alive: all ranks together send 2,000 a second."""
    return max(ALIVE_SECONDS, world_size / _ALIVE_MESSAGES)


def require_files(ranks: int) -> None:
    """Let this process open a connection to each rank. Raises LaunchError where the system does not allow so many."""
    needed = ranks + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    raise LaunchError(
        f"rank 0 (or megalite launch) keeps a connection to each of {ranks:,} ranks, which takes {needed:,} open "
        f"files, but this process may have {hard:,}; raise the limit on this host to {needed} (ulimit -Hn, LimitNOFILE "
        "of systemd, --ulimit nofile of a container)"
    )
