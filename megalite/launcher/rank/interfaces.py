"""The network interfaces of this host and their addresses, from getifaddrs(3)."""

import ctypes
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

# From <net/if.h>.
_IFF_UP = 0x1


@dataclass(frozen=True)
class InterfaceAddress:
    """An address of an interface that is up; IPv6 addresses of one link only have their scope: "fe80::1%eth0"."""

    interface: str
    address: str

    @cached_property
    def parsed(self) -> IPv4Address | IPv6Address:
        return ip_address(self.address)

    @property
    def reachable(self) -> bool:
        """Whether other hosts may reach it."""
        return not self.parsed.is_loopback and not self.parsed.is_link_local

    @property
    def of_containers(self) -> bool:
        """Whether the interface is a bridge of this host's own containers or virtual machines."""
        return Path("/sys/class/net", self.interface, "bridge").exists()


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interface_addresses() -> tuple[InterfaceAddress, ...]:
    """Return the IPv4 and IPv6 addresses of the interfaces that are up, in the kernel's order."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        return ()
    try:
        return tuple(_walk(first))
    finally:
        library.freeifaddrs(first)


def _walk(entry: "ctypes._Pointer[_Ifaddrs]") -> Iterator[InterfaceAddress]:
    while entry:
        interface = entry.contents
        name = (interface.name or b"").decode(errors="replace")
        if interface.address and interface.flags & _IFF_UP:
            # struct sockaddr: the family is a host integer of two bytes on Linux.
            family = int.from_bytes(ctypes.string_at(interface.address, 2), sys.byteorder)
            if family == socket.AF_INET:
                yield InterfaceAddress(
                    name, socket.inet_ntop(family, ctypes.string_at(interface.address + 4, 4))
                )
            elif family == socket.AF_INET6:
                address = socket.inet_ntop(family, ctypes.string_at(interface.address + 8, 16))
                local = ip_address(address).is_link_local
                yield InterfaceAddress(name, f"{address}%{name}" if local else address)
        entry = interface.next
