"""The rules over all hosts' facts: each difference names the host, the values and the remedy, and marks its cell."""

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.launcher.hosts.host_report import GIB, HostReport, HostRequirements, judge
from megalite.launcher.hosts.host_table import WIDTH, table
from megalite.launcher.hosts.preflight import Preflight

NEEDS = HostRequirements(Path("/jobs"), "/env/bin/python", Path("run.toml"), Path("runs/big"))
YES = {"address": "10.0.0.1", "own": "10.0.0.2", "interface": "eth0", "error": ""}


def report(host: str, **changed) -> HostReport:
    """A host without problems, except for the facts or fields that a case changes."""
    facts = {
        "host": host,
        "own_name": {"addresses": ["10.0.0.2"], "error": ""},
        "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.2"},
        "folder": "/jobs",
        "python": "3.11.9",
        "megalite": "0.1.0 abcdef",
        "megalite_error": "",
        "megalite_hidden_by": "",
        "library": "17e5821e0591",
        "torch": "2.13.0",
        "deepspeed": "0.19.8",
        "transformers": "5.2.0",
        "run_file": {"digest": "", "error": ""},
        "gpus": 8,
        "accelerator": True,
        "cores": 64,
        "memory_bytes": 500 * GIB,
        "total_memory_bytes": 512 * GIB,
        "shared_memory_bytes": 250 * GIB,
        "disk_bytes": 900 * GIB,
        "disk_error": "",
    }
    fields = {name: changed.pop(name) for name in list(changed) if name not in facts}
    whole = HostReport(
        host,
        8,
        facts=facts | changed,
        clock_seconds=0.0,
        to_first=YES,
        from_first=YES,
        to_launcher=YES,
        shared=True,
    )
    return replace(whole, **fields)


def lines(*reports: HostReport, needs: HostRequirements = NEEDS) -> list[str]:
    return list(Preflight(reports, judge(reports, needs)).lines())


ODD = [
    (
        {"torch": "2.12.0"},
        "torch",
        "error: n2: torch is 2.12.0, but 2.13.0 on n0, n1, n3; install the same version",
    ),
    ({"torch": ""}, "torch", "error: n2: torch is not installed for /env/bin/python; install it there"),
    ({"deepspeed": ""}, "deepspeed", "error: n2: deepspeed is not installed, but 0.19.8 on n0, n1, n3"),
    ({"python": "3.12.1"}, "python", "warning: n2: python is 3.12.1, but 3.11.9 on n0, n1, n3"),
    ({"megalite": "0.1.0 123456"}, "megalite", "error: n2: megalite is 0.1.0 123456, but 0.1.0 abcdef on"),
    (
        {"library": "0000"},
        "library",
        "error: n2: library is 0000, but 17e5821e0591 on n0, n1, n3; build it on that",
    ),
    ({"gpus": 0}, "GPUs", "error: n2: no GPU is visible, but n0, n1, n3 have some; run nvidia-smi there"),
    ({"gpus": 7}, "GPUs", "error: n2: 8 slots, but 7 GPUs; write slots=7"),
    ({"cores": 1}, "cores", "warning: n2: 8 slots share 1 core: ranks take turns; write slots=1"),
    (
        {"memory_bytes": GIB},
        "memory",
        "warning: n2: 1.0 GiB of memory are free for 8 ranks; end other programs",
    ),
    ({"shared_memory_bytes": 2**26}, "/dev/shm", "warning: n2: 64 MiB of shared memory are free; NCCL needs"),
    ({"shared_memory_bytes": None}, "/dev/shm", "warning: n2: there is no /dev/shm; mount a tmpfs there"),
    (
        {"disk_bytes": 2**20},
        "disk",
        "warning: n2: the disk of run.folder runs/big has 1 MiB left; remove old",
    ),
    (
        {"disk_error": "/x cannot be written"},
        "run folder",
        "error: n2: /x cannot be written, and run.folder is",
    ),
    (
        {"clock_seconds": -2.5},
        "clock",
        "warning: n2: its clock is 2.5 s behind that of n0; times in logs mislead",
    ),
    (
        {"port_error": "no port from 1 to 2 is free"},
        "address",
        "error: n2: no port from 1 to 2 is free; end the",
    ),
    (
        {"from_first": {**YES, "error": "10.0.0.2 port 9: timed out"}},
        "from first",
        "error: n2: n0 cannot connect to n2: 10.0.0.2 port 9: timed out; open these ports between the hosts",
    ),
    (
        {"to_launcher": {**YES, "error": "10.0.0.9 port 9: No route to host"}},
        "to launcher",
        "error: n2: n2 cannot connect to this machine: 10.0.0.9 port 9: No route to host; open these ports",
    ),
    (
        {"to_first": {**YES, "own": "127.0.1.1"}},
        "address",
        "error: n2: it reaches n0 through 127.0.1.1, an address of this host alone; remove the line with 127.*",
    ),
    (
        {"shared": False},
        "run folder",
        "error: n2: run.folder runs/big is another folder than the first host's",
    ),
]


@pytest.mark.parametrize(("changed", "row", "sentence"), ODD, ids=[row for _, row, _ in ODD])
def test_the_one_host_that_differs_is_named_and_its_cell_marked(changed, row, sentence):
    found = lines(*(report(f"n{each}", **(changed if each == 2 else {})) for each in range(4)))
    said = [line for line in found if line.startswith(("error", "warning"))]
    assert len(said) == 1 and said[0].startswith(sentence), said
    mark = "!" if said[0].startswith("error") else "?"
    (marked,) = (line for line in found if mark in line and line not in said)
    assert marked.startswith(f"{row:<14}") and marked.count(mark) == 1
    head = next(line for line in found if "n2" in line)
    assert marked.index(mark) == head.index("n2") - 2


@pytest.mark.parametrize(("gpus", "wsl", "refused"), [(0, False, True), (8, False, False), (0, True, False)])
def test_a_host_without_the_memory_of_its_ranks_is_refused_where_no_card_has_it(gpus, wsl, refused):
    needs, cards = replace(NEEDS, rank_bytes=20 * GIB), {"gpus": gpus, "accelerator": gpus > 0 or wsl}
    found = lines(report("n0", **cards, total_memory_bytes=100 * GIB), report("n1", **cards), needs=needs)
    assert [line for line in found if line.startswith("error")] == refused * [
        "error: n0: 8 ranks need 160.0 GiB or more for weights, gradients, optimizer and one micro batch, and the host "
        "has 100.0 GiB; use more hosts, or raise parallel.tensor or parallel.pipeline"
    ]


def test_hosts_alike_pass_without_a_word():
    assert judge([report("n0"), report("n1")], NEEDS) == []


def test_debians_own_name_is_a_note_that_stops_nothing():
    own = {"addresses": ["127.0.1.1"], "error": ""}
    result = Preflight([report("n0", own_name=own)], judge([report("n0", own_name=own)], NEEDS))
    assert result.passed == ["n0"]
    assert list(result.lines())[-1] == (
        "note: n0: the host's own name has the address 127.0.1.1 in its /etc/hosts; megalite does not use it"
    )


def test_an_interface_that_a_host_lacks_is_named_with_those_it_has():
    needs = replace(NEEDS, environment={"NCCL_SOCKET_IFNAME": "ib0"})
    with_it = report("n0", interfaces={"lo": "127.0.0.1", "ib0": "10.0.0.1"})
    found = lines(with_it, report("n1"), needs=needs)
    assert (
        "error: n1: there is no network interface ib0; it has lo, eth0; set launch.interface to one that"
        in found[-1]
    )
    assert replace(NEEDS, environment={"NCCL_SOCKET_IFNAME": "^docker0"}).interface == ""
    assert replace(NEEDS, environment={"NCCL_SOCKET_IFNAME": "=ib0"}).interface == "ib0"
    assert replace(needs, launch_interface="eth0").interface == "eth0"


def test_a_failed_first_host_leaves_the_others_comparable():
    lost = HostReport("n0", 8, failure="unreachable", detail="No route to host")
    found = lines(lost, report("n1"), report("n2", torch="2.12.0"))
    assert [line for line in found if line.startswith("error")] == [
        "error: n0: cannot be reached: No route to host; try `ssh -o BatchMode=yes n0 true`: "
        "it must end without a question",
        "error: n2: torch is 2.12.0, but 2.13.0 on n1; install the same version on all hosts, "
        "or use one environment in a folder that they share",
    ]


def test_the_table_of_many_hosts_keeps_its_width_and_shows_those_with_problems():
    hosts = [
        report(f"a-long-name-of-a-node-{each}", torch="2.12.0" if each in (3, 31) else "2.13.0")
        for each in range(64)
    ]
    found = list(table(hosts, judge(hosts, NEEDS)))
    assert max(map(len, found)) <= WIDTH
    assert found[0] == "56 more hosts passed and are not shown"
    assert "".join(found).count("! 2.12.0") == 2
