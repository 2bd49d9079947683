"""The sockets of the server's address; without torch, so that a taken port is said before anything is loaded."""

import errno
import socket

from megalite.errors import LaunchError
from megalite.serve.settings import ServeSettings

_BACKLOG = 1024
_UNAVAILABLE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(settings: ServeSettings) -> list[socket.socket]:
    """Return sockets at the server's address, one for each address of the host. Raises LaunchError."""
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        places = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        message = f"--host {settings.host} has no address ({error}); name one of this machine"
        raise LaunchError(message) from error
    for family, _, _, _, address in dict.fromkeys(places):
        try:
            opened = socket.create_server((address[0], port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno in _UNAVAILABLE and family == socket.AF_INET6:
                continue
            for other in sockets:
                other.close()
            raise LaunchError(
                f"--host {settings.host} --port {port} cannot be used ({error.strerror}); "
                "end the program that listens there, or choose another --port (0: any free one)",
                key="--port",
                set={"--port": 0},
                value=port,
            ) from error
        # Connections inherit it; asyncio sets it for sockets of a named protocol alone.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.append(opened)
        # Port 0 is any free one: the next address of the host has the same.
        port = opened.getsockname()[1]
    if not sockets:
        raise LaunchError(f"--host {settings.host} has no address on this machine; name another one")
    return sockets
