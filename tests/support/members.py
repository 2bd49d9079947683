"""A member of a job that ends without its process ending."""

import socket

from megalite.launcher.control.member import Member


def break_off(member: Member) -> None:
    """End a member's connection as the death of its process does."""
    member._left = True
    member._socket.shutdown(socket.SHUT_RDWR)
