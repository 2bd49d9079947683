"""The sockets between ranks and coordinator: how a dead link is noticed, and how many a process may open."""

import resource
import socket
from contextlib import suppress
from pathlib import Path

_PROBE_SECONDS = 5


def watch_link(connection: socket.socket, seconds: float) -> None:
    """Have the kernel end a connection whose other host does not answer for `seconds`, even one that is silent.

    The kernel answers for a process that is stopped or computes without Python, so such a process is not taken for a
    lost host.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    probe = max(1, min(_PROBE_SECONDS, int(seconds / 3)))
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


def owner_of_port(port: int) -> str:
    """Return "pid 12 (name)", the process of this user that listens at a port; "" if it cannot be seen."""
    listening = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
            rows = (line.split() for line in lines)
            # State 0A is LISTEN; the address is HEX:PORT.
            listening |= {
                f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1][-4:], 16) == port
            }
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(opened.readlink()) in listening:
                process = opened.parents[1]
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def raise_file_limit(needed: int) -> None:
    """Raise this process's limit of open files where it is below `needed` and the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed + 256:
        wanted = needed + 256 if hard == resource.RLIM_INFINITY else min(hard, needed + 256)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
