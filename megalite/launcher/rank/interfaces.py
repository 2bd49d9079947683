"""The network interfaces of this host and their addresses."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any


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


def interface_addresses() -> tuple[InterfaceAddress, ...]:
    """Return the addresses of the interfaces that are up, IPv4 first, else in the kernel's order."""
    import psutil  # type: ignore[import-untyped]

    states: Mapping[str, Any] = {}
    with suppress(OSError):  # a sandbox may hide /proc
        states = psutil.net_if_stats()
    return tuple(
        InterfaceAddress(name, each.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, addresses in psutil.net_if_addrs().items()
        # A further address has the name of its interface with a colon: eth0:1.
        if (state := states.get(name.partition(":")[0])) is None or "up" in state.flags.split(",")
        for each in addresses
        if each.family == family
    )
