"""Chooses interface and address over which a rank reaches the others: by route, never loopback between hosts."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from megalite.errors import LaunchError, listed
from megalite.launcher.rank.detect import LOOPBACK, RankInfo
from megalite.launcher.rank.interfaces import InterfaceAddress, interface_addresses

# The variables by which gloo, NCCL and torch's RPC are told their interface.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SETTING = "launch.interface"


@dataclass(frozen=True)
class Route:
    """How this rank reaches the master, and the others reach this rank.

    interface: its name here; other hosts may name theirs differently. address: this rank's own. master: the master's,
    as a number. serves: the master's address is this host's own. note: a decision that the user should know; or empty.
    """

    interface: str
    address: str
    master: str
    serves: bool
    note: str = ""


def route_to_master(info: RankInfo, environ: Mapping[str, str], interface: str = "auto") -> Route:
    """Return the route between this rank and the master address.

    interface: the setting launch.interface; "auto": GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME if the user has set one,
    else the interface of the route to the master. Asks the kernel only: no packet is sent, but a name may be looked up.

    Raises LaunchError for a master that cannot be looked up or has no route, for an interface that this host lacks, and
    for addresses that only this host reaches, where ranks run on several.
    """
    if info.on_one_node:
        return Route("lo", LOOPBACK, info.master_addr, serves=True)
    own = interface_addresses()
    chosen = _chosen_interface(own, environ, interface)
    addresses = _looked_up(info)
    away = [address for address in addresses if not ip_address(address).is_loopback]
    if not away and info.master_addr in ("localhost", *addresses):
        raise LaunchError(
            f"MASTER_ADDR = {info.master_addr} means every host itself, but the {info.world_size} ranks run on "
            f"{info.hosts} hosts; set MASTER_ADDR to the name or address of rank 0's host"
        )
    here = {each.address: each for each in chosen or own}
    if not away and not _is_this_host(info):
        raise LaunchError(
            f"MASTER_ADDR = {info.master_addr} means {', '.join(addresses)} on {info.node}, which is {info.node} "
            "itself, not rank 0's host; correct /etc/hosts there, or set MASTER_ADDR to the address of rank 0's host"
        )
    if not away:
        # Debian writes "127.0.1.1 NAME" into /etc/hosts: the master's name is this host's own.
        source = _own_address(chosen or own, chosen_by_user=bool(chosen))
        note = (
            f"{info.master_addr} means {', '.join(addresses)} here, which other hosts cannot reach: this host uses "
            f"{source.address} ({source.interface}) instead"
        )
        return Route(source.interface, source.address, source.address, serves=True, note=note)
    served = next((each for each in own if each.address in away), None)
    if served is not None:
        source = here.get(served.address) or _of_family(chosen, served.address)
        return Route(source.interface, source.address, served.address, serves=True)
    route = _by_kernel(away, here)
    if route is None and not chosen:
        raise LaunchError(
            f"MASTER_ADDR = {info.master_addr} ({', '.join(away)}) has no route from {info.node}, whose addresses are "
            f"{_described(own)}; set MASTER_ADDR to an address of rank 0's host in one of these networks"
        )
    if route is None:
        source = _of_family(chosen, away[0])
        return Route(source.interface, source.address, away[0], serves=False)
    return route


def interface_variables(route: Route, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell gloo and NCCL this rank's interface, without those that the user has set."""
    chosen = {**named_interface(route.interface), "TP_SOCKET_IFNAME": route.interface}
    return {name: value for name, value in chosen.items() if not environ.get(name, "").strip()}


def named_interface(interface: str) -> dict[str, str]:
    """Return the variables of gloo and NCCL that name exactly this interface: to NCCL a bare name is a prefix."""
    return {GLOO: interface, NCCL: f"={interface}"}


def serving_addresses(environ: Mapping[str, str], interface: str = "auto") -> list[str]:
    """Return this host's addresses that others may reach, the likeliest first; `interface` as for `route_to_master`.

    Raises LaunchError without such an address.
    """
    own = interface_addresses()
    chosen = _chosen_interface(own, environ, interface)
    first = _own_address(chosen or own, chosen_by_user=bool(chosen))
    others = [each for each in chosen or own if each.reachable and each != first]
    return [each.address for each in (first, *sorted(others, key=lambda address: address.of_containers))]


def _looked_up(info: RankInfo) -> list[str]:
    """Return the numeric addresses of the master, IPv4 first."""
    name = info.master_addr.strip("[]")
    try:
        entries = socket.getaddrinfo(name, info.master_port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise LaunchError(
            f"MASTER_ADDR = {info.master_addr} cannot be looked up on {info.node} ({error.strerror or error}); set it "
            "to an address, or to a name that every host knows"
        ) from None
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _is_this_host(info: RankInfo) -> bool:
    """Whether a master's name that leads to loopback is the name of this host."""
    if info.launcher != "torchrun" and (info.rank == 0 or info.node_rank == 0):
        return True  # under torchrun the master is the rendezvous host, wherever rank 0 is
    return info.master_addr.split(".")[0] == socket.gethostname().split(".")[0]


def _by_kernel(addresses: Sequence[str], here: Mapping[str, InterfaceAddress]) -> Route | None:
    """Return the kernel's route to the first of `addresses` with one that begins at an address of `here`."""
    for address in addresses:
        try:
            source = source_address(address)
        except OSError:
            continue
        if source in here:
            return Route(here[source].interface, source, address, serves=False)
    return None


def source_address(remote: str) -> str:
    """Return this host's address on the route to `remote`, a numeric address. Raises OSError without a route."""
    family = socket.AF_INET6 if ":" in remote else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(socket.getaddrinfo(remote, 9, family, socket.SOCK_DGRAM)[0][4])  # sends no packet
        name = probe.getsockname()
        scoped = family == socket.AF_INET6 and name[3] and "%" not in name[0]
        return f"{name[0]}%{socket.if_indextoname(name[3])}" if scoped else str(name[0])


def _own_address(own: Sequence[InterfaceAddress], *, chosen_by_user: bool = False) -> InterfaceAddress:
    """Return the address by which other hosts most likely reach this one: on the default route, else the first."""
    candidates = [each for each in own if each.reachable and (chosen_by_user or not each.of_containers)]
    if not candidates:
        raise LaunchError(
            f"this host has no address that others can reach: it has {_described(own)}; set {SETTING} in the run file, "
            f"or {GLOO}, to an interface between the hosts"
        )
    candidates.sort(key=lambda address: address.parsed.version)
    try:
        # An address of documentation (RFC 5737): nothing is sent, and only a default route leads there.
        default = source_address("192.0.2.1")
    except OSError:
        default = ""
    return next((each for each in candidates if each.address == default), candidates[0])


def _chosen_interface(
    own: Sequence[InterfaceAddress], environ: Mapping[str, str], interface: str
) -> list[InterfaceAddress]:
    """Return the addresses of the interface that the user chose; empty if the user chose none."""
    wishes = {SETTING: "" if interface == "auto" else interface} | {
        name: environ.get(name, "").strip() for name in (GLOO, NCCL)
    }
    wish = next(((name, value) for name, value in wishes.items() if value), None)
    if wish is None:
        return []
    name, value = wish
    matching = [each for each in own if _names(value, each.interface, prefixes=name == NCCL)]
    if not matching:
        raise LaunchError(
            f"{name} = {value!r} names no interface of {socket.gethostname()}; it has {_described(own)}"
        )
    reachable = [each for each in matching if each.reachable]
    if not reachable:
        raise LaunchError(
            f"{name} = {value!r} has no address that other hosts reach, but the ranks run on several hosts; "
            f"{socket.gethostname()} has {_described(own)}"
        )
    return reachable


def _names(value: str, interface: str, *, prefixes: bool) -> bool:
    """Whether a list of interfaces names one: gloo's names are whole, NCCL's prefixes but after "="; "^" excludes."""
    if not prefixes:
        return interface in (each.strip() for each in value.split(","))
    included, rest = not value.startswith("^"), value.removeprefix("^")
    whole, rest = rest.startswith("="), rest.removeprefix("=")
    names = [each.strip() for each in rest.split(",")]
    return (interface in names if whole else interface.startswith(tuple(names))) is included


def _of_family(own: Sequence[InterfaceAddress], remote: str) -> InterfaceAddress:
    version = ip_address(remote).version
    for interface in own:
        if interface.parsed.version == version:
            return interface
    raise LaunchError(
        f"the master's address {remote} is IPv{version}, but the interface {own[0].interface} has only "
        f"{_described(own)}; set {SETTING} to another one, or MASTER_ADDR to an address of its family"
    )


def _described(own: Sequence[InterfaceAddress]) -> str:
    return listed([f"{each.interface} ({each.address})" for each in own], most=8) or "no address at all"
