"""The network interfaces of this host and their addresses."""

import socket
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path


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
    """Return the addresses of the interfaces that are up, in the kernel's order, IPv4 first."""
    # Imported here: only ranks on several hosts need it, and it takes as long as all else of this package.
    import psutil  # type: ignore[import-untyped]

    up = {name for name, state in psutil.net_if_stats().items() if "up" in state.flags.split(",")}
    addresses = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    return tuple(
        InterfaceAddress(name, entry.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, entry in addresses
        if entry.family == family and name in up
    )
