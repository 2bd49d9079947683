"""The interface and address of a rank: by route, never loopback between hosts."""

import socket

import pytest

from megalite.errors import LaunchError
from megalite.launcher.rank import address
from megalite.launcher.rank.address import interface_variables, route_to_master
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.interfaces import InterfaceAddress, interface_addresses

RANK = RankInfo(0, 4, 0, 2, "n0", 29500, "slurm", "n0", node_rank=0, hosts=2)
HERE = tuple(
    InterfaceAddress(name, number)
    for name, number in [
        ("lo", "127.0.0.1"),
        ("docker0", "172.17.0.1"),
        ("eth0", "10.77.0.10"),
        ("ib0", "10.88.0.10"),
        ("eth0", "fd00::10"),
        ("eth0", "fe80::1%eth0"),
    ]
)
NAMES = {
    "n0": ["127.0.1.1"],
    "n0.cluster": ["127.0.1.1", "10.77.0.10"],
    "n1": ["10.77.0.11"],
    "n1-ib": ["10.88.0.11"],
    "n6": ["fd00::11"],
    "both": ["fd00::11", "10.77.0.11"],
    "far": ["203.0.113.9"],
    "localhost": ["127.0.0.1"],
    "127.0.0.1": ["127.0.0.1"],
}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host n0 with two networks of its own, a bridge for containers, and no default route."""

    def looked_up(name, port, *_, **__):
        if name not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in number else socket.AF_INET, 2, 17, "", (number, port))
            for number in NAMES[name]
        ]

    def routed(remote):
        for known, own in (("10.77.", "10.77.0.10"), ("10.88.", "10.88.0.10"), ("fd00:", "fd00::10")):
            if remote.startswith(known):
                return own
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(address, "interface_addresses", lambda: HERE)
    monkeypatch.setattr(address, "source_address", routed)
    monkeypatch.setattr(InterfaceAddress, "of_containers", property(lambda self: self.interface == "docker0"))
    monkeypatch.setattr(address.socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(address.socket, "gethostname", lambda: "n0")


def info(master, **changes):
    return RankInfo(**(vars(RANK) | {"master_addr": master, "node_rank": 1, "rank": 2} | changes))


@pytest.mark.parametrize(
    ("master", "interface", "own"),
    [
        ("n1", "eth0", "10.77.0.10"),
        ("n1-ib", "ib0", "10.88.0.10"),
        ("n6", "eth0", "fd00::10"),
        ("both", "eth0", "10.77.0.10"),
    ],
)
def test_the_interface_is_that_of_the_route_to_the_master(master, interface, own):
    route = route_to_master(info(master), {})
    assert (route.interface, route.address, route.serves, route.note) == (interface, own, False, "")
    assert route.master == NAMES[master][-1]


def test_debians_own_name_entry_is_never_served_on():
    route = route_to_master(RANK, {})
    assert (route.interface, route.address, route.master, route.serves) == (
        "eth0",
        "10.77.0.10",
        "10.77.0.10",
        True,
    )
    assert route.note == (
        "n0 means 127.0.1.1 here, which other hosts cannot reach: this host uses 10.77.0.10 (eth0) instead"
    )
    # A second entry with an address of the network is taken without a word.
    route = route_to_master(info("n0.cluster", rank=0, node_rank=0), {})
    assert (route.address, route.serves, route.note) == ("10.77.0.10", True, "")


def test_another_hosts_name_must_not_lead_to_this_host(monkeypatch):
    monkeypatch.setattr(address.socket, "gethostname", lambda: "n1")
    with pytest.raises(LaunchError, match=r"^MASTER_ADDR = n0 means 127\.0\.1\.1 on n1, which is n1 itself"):
        route_to_master(info("n0", node="n1"), {})
    for master in ("localhost", "127.0.0.1"):
        with pytest.raises(
            LaunchError, match=f"MASTER_ADDR = {master} means every host itself, but the 4 ranks run on 2"
        ):
            route_to_master(info(master), {})
    local = route_to_master(info("localhost", world_size=2, rank=1, hosts=1), {})
    assert (local.interface, local.address) == ("lo", "127.0.0.1")


def test_a_master_that_cannot_be_reached_is_said_with_this_hosts_addresses():
    with pytest.raises(
        LaunchError, match=r"MASTER_ADDR = nowhere cannot be looked up on n0 \(Name or service"
    ):
        route_to_master(info("nowhere"), {})
    with pytest.raises(LaunchError, match=r"no route from n0, whose .* ib0 \(10\.88"):
        route_to_master(info("far"), {})


@pytest.mark.parametrize(
    ("environ", "setting", "interface"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "auto", "ib0"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "auto", "ib0"),
        ({"NCCL_SOCKET_IFNAME": "=ib0,eth0"}, "auto", "eth0"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker,eth"}, "auto", "ib0"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, "auto", "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "ib0", "ib0"),
    ],
)
def test_the_users_choice_wins_and_all_libraries_follow_it(environ, setting, interface):
    route = route_to_master(info("n1"), environ, setting)
    assert route.interface == interface
    variables = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}
    # A bare name is a prefix to NCCL, whole to the others: eth1 would be eth10 too.
    expected = {**dict.fromkeys(variables, interface), "NCCL_SOCKET_IFNAME": f"={interface}"}
    assert interface_variables(route, environ) == {
        name: value for name, value in expected.items() if name not in environ
    }


@pytest.mark.parametrize(
    ("environ", "setting", "message"),
    [
        (
            {"GLOO_SOCKET_IFNAME": "eth7"},
            "auto",
            "GLOO_SOCKET_IFNAME = 'eth7' names no interface of n0; it has lo",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "auto", "GLOO_SOCKET_IFNAME = 'eth' names no interface"),
        ({}, "ib7", "launch.interface = 'ib7' names no interface of n0; .* ib0 \\(10.88.0.10\\)"),
        (
            {"GLOO_SOCKET_IFNAME": "lo"},
            "auto",
            "GLOO_SOCKET_IFNAME = 'lo' has no address that other hosts reach",
        ),
    ],
)
def test_an_interface_that_cannot_serve_is_refused_with_those_that_exist(environ, setting, message):
    with pytest.raises(LaunchError, match=message):
        route_to_master(info("n1"), environ, setting)


def test_an_interface_without_the_masters_family_is_refused():
    with pytest.raises(LaunchError, match="the master's address fd00::11 is IPv6, but the interface ib0 has"):
        route_to_master(info("n6"), {}, "ib0")


def test_this_machines_interfaces_are_those_that_the_kernel_lists():
    found = interface_addresses()
    assert {each.interface for each in found} <= {name for _, name in socket.if_nameindex()}
    assert any(each.parsed.is_loopback for each in found)
    assert not any(each.reachable for each in found if each.interface == "lo")
