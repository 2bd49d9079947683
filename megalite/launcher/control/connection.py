"""The sockets between ranks and coordinator: how a dead link is noticed, and how many a process may open."""

import errno
import resource
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

_PROBE_SECONDS = 5


@dataclass(frozen=True)
class RendezvousLimits:
    """The times that `[launch]` sets, in seconds: for ranks to come, and for a host to answer."""

    rendezvous_seconds: float = 300.0
    heartbeat_seconds: float = 30.0


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


def raise_file_limit(needed: int) -> None:
    """Raise this process's limit of open files where it is below `needed` and the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed + 256:
        limit = needed + 256 if hard == resource.RLIM_INFINITY else min(hard, needed + 256)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
