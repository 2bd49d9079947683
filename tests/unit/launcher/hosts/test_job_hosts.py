"""The hosts of a job, by hostfile, SLURM allocation or this machine, and the ranks that each of them gets."""

import base64
import json

import pytest

from megalite.errors import LaunchError
from megalite.launcher.hosts.hostfile import Host
from megalite.launcher.hosts.job_hosts import HostOptions, Hosts, find_hosts, local_gpus, place_ranks
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.host_of_rank import hosts_of_ranks


def encode_world_info(hosts: dict[str, list[int]]) -> str:
    """As deepspeed.launcher.runner does, whose import takes seconds."""
    return base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("n0 slots=4\nn1 slots=4\nn2 slots=2\n")
    return path


@pytest.fixture
def devices(tmp_path):
    folder = tmp_path / "dev"
    folder.mkdir()
    return folder


def chosen(hostfile, **options) -> dict[str, tuple[int, ...]]:
    found = find_hosts(HostOptions(hostfile, **options), {})
    return {host.name: host.slots for host in found.hosts}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "n1"}, {"n1": (0, 1, 2, 3)}),
        ({"include": "n1:3,0@n0"}, {"n0": (0, 1, 2, 3), "n1": (0, 3)}),
        ({"exclude": "n1@n0:0,2"}, {"n0": (1, 3), "n2": (0, 1)}),
        ({"exclude": "n0:0,1,2,3"}, {"n1": (0, 1, 2, 3), "n2": (0, 1)}),
        ({"hosts": 2}, {"n0": (0, 1, 2, 3), "n1": (0, 1, 2, 3)}),
        ({"slots": 2}, {"n0": (0, 1), "n1": (0, 1), "n2": (0, 1)}),
        ({"include": "n0:1,2,3@n1", "slots": 1}, {"n0": (1,), "n1": (0,)}),
    ],
    ids=str,
)
def test_hosts_and_slots_are_chosen_as_deepspeed_does(hostfile, options, expected):
    assert chosen(hostfile, **options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "n7"}, "n7: is not a host of the hostfile .*; it has n0, n1, n2"),
        ({"include": "n2:0,5"}, "n2:0,5: n2 has no slot 5; it has 0, 1"),
        ({"include": "n0:a"}, "n0:a: 'a' is no list of slots; write n0:0,1 or n0"),
        ({"include": "n0:0:1"}, "n0:0:1: '0:1' is no list of slots"),
        ({"include": "n0:"}, "n0:: '' is no list of slots"),
        ({"include": "n0:٢"}, "is no list of slots"),
        ({"include": "n0:1,1"}, "n0:1,1: names slot 1 twice"),
        ({"include": "n0@n0:1"}, "n0: is named twice"),
        ({"include": "n0@"}, "'': names no host"),
        ({"exclude": "n7@n8"}, "has 2 problems"),
        ({"exclude": "n0@n1@n2"}, "leaves no slot of the hostfile"),
        ({"include": "n0", "exclude": "n1"}, "--include and --exclude cannot be combined"),
        ({"hosts": 4}, "--hosts 4: the hostfile .* has 3; use 3 or fewer"),
        ({"slots": 3}, "--slots 3: n2 has 2; use 2 or fewer"),
    ],
    ids=str,
)
def test_a_wrong_choice_is_named(hostfile, options, message):
    with pytest.raises(LaunchError, match=message):
        chosen(hostfile, **options)


def test_too_many_ranks_are_refused_with_numbers_and_remedies(hostfile):
    found = find_hosts(HostOptions(hostfile, hosts=2), {})
    with pytest.raises(LaunchError) as caught:
        place_ranks(found, 9)
    text = str(caught.value)
    assert "the run has 9 ranks" in text and "has 8 slots (n0 4, n1 4)" in text
    assert (
        "(n0 4, n1 4) with --hosts 2, and a slot" in text
        and "use a smaller layout, or leave out --hosts 2" in text
    )
    with pytest.raises(LaunchError, match="use a smaller layout, or add hosts or slots to it"):
        place_ranks(found, 11)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exclude": "n1@n0:0"}, "--exclude n1@n0:0"),
        ({"include": "n0"}, "--include n0"),
        ({"slots": 1}, "--slots 1"),
        ({"exclude": "n2", "hosts": 1}, "--exclude n2 and --hosts 1"),
    ],
    ids=str,
)
def test_options_that_took_the_slots_away_are_named(hostfile, options, named):
    with pytest.raises(
        LaunchError, match=f"with {named.replace(' and', '')}, and a slot .* leave out {named}$"
    ):
        place_ranks(find_hosts(HostOptions(hostfile, **options), {}), 10)


def test_hosts_that_were_excluded_are_named_where_too_few_are_left(hostfile):
    with pytest.raises(
        LaunchError, match=r"^--hosts 3: the hostfile .* has 2 with --exclude n1; use 2 or fewer"
    ):
        find_hosts(HostOptions(hostfile, exclude="n1", hosts=3), {})


def test_ranks_fill_the_first_hosts_and_the_idle_slots_are_told(hostfile):
    placed, idle = place_ranks(find_hosts(HostOptions(hostfile), {}), 6)
    assert [(each.name, each.ranks, each.slots, each.chosen) for each in placed] == [
        ("n0", range(4), (0, 1, 2, 3), False),
        ("n1", range(4, 6), (0, 1), False),
    ]
    assert idle == ("2 of 4 slots of n1", "n2")
    placed, idle = place_ranks(find_hosts(HostOptions(hostfile, include="n0:1,3@n2"), {}), 4)
    assert [(each.name, each.slots, each.chosen) for each in placed] == [
        ("n0", (1, 3), True),
        ("n2", (0, 1), False),
    ]
    assert not idle


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]"}


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}, [2, 2]),
        ({"SLURM_TASKS_PER_NODE": "3,1", "SLURM_NTASKS": "4", "SLURM_GPUS_ON_NODE": "8"}, [3, 1]),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "8"}, [8, 8]),
        ({}, [1, 1]),
    ],
    ids=str,
)
def test_the_slots_of_a_slurm_allocation_are_its_tasks_or_gpus(variables, slots):
    found = find_hosts(HostOptions(), SLURM | variables)
    assert (found.source, found.named) == ("slurm", "the SLURM job 7")
    assert [(host.name, len(host.slots)) for host in found.hosts] == [("n0", slots[0]), ("n1", slots[1])]


def test_a_hostfile_and_the_local_option_go_before_the_slurm_allocation(hostfile, devices):
    assert find_hosts(HostOptions(hostfile), SLURM).source == "hostfile"
    assert find_hosts(HostOptions(local=True), SLURM, devices).source == "local"


def test_variables_of_slurm_that_disagree_are_named():
    with pytest.raises(LaunchError, match=r"SLURM_TASKS_PER_NODE = '2\(x3\)' has 3 nodes, but .* has 2"):
        find_hosts(HostOptions(), SLURM | {"SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS": "6"})


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("0", 1),
        ("3,1,0", 3),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),
        ("GPU-8932f937,MIG-1/2/3", 2),
    ],
)
def test_local_slots_are_the_visible_gpus(devices, visible, count):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_gpus(environ, devices) == count


def test_a_machine_without_gpus_has_as_many_slots_as_the_run_has_ranks(devices):
    found = find_hosts(HostOptions(), {}, devices)
    assert found.slots is None
    placed, idle = place_ranks(found, 4)
    assert [(each.name, each.ranks) for each in placed] == [("localhost", range(4))] and not idle
    with pytest.raises(LaunchError, match="this machine has no GPU, and so no numbered slots"):
        find_hosts(HostOptions(include="localhost:0"), {}, devices)
    with pytest.raises(LaunchError, match="this machine has 2 slots"):
        place_ranks(find_hosts(HostOptions(slots=2), {}, devices), 4)


def test_gpus_limit_the_local_ranks(devices):
    (devices / "nvidia0").touch()
    found = find_hosts(HostOptions(), {}, devices)
    assert found == Hosts("local", "this machine", (Host("localhost", (0,)),))
    with pytest.raises(LaunchError, match=r"has 1 slot .*set CUDA_VISIBLE_DEVICES= \(empty\)"):
        place_ranks(found, 2)


def rank_of(launcher: str, world_size: int) -> RankInfo:
    return RankInfo(0, world_size, 0, 2, "n0", 29500, launcher, "n0")


STEP = {"SLURM_STEP_NODELIST": "n[0-1]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}


@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        ("slurm", STEP, ("n0", "n0", "n1")),
        ("slurm", {**STEP, "SLURM_DISTRIBUTION": "block"}, ("n0", "n0", "n1")),
        # The ranks are dealt out in turn, or in a way that only the file of --distribution knows.
        ("slurm", {**STEP, "SLURM_DISTRIBUTION": "cyclic"}, ()),
        ("slurm", {**STEP, "SLURM_DISTRIBUTION": "arbitrary"}, ()),
        ("deepspeed", {}, ("n0", "n0", "n1")),
        ("openmpi", {}, ()),
    ],
)
def test_the_host_of_each_rank_is_known_where_the_launcher_says_it(launcher, environ, expected):
    world = encode_world_info({"n0": [0, 1], "n1": [0]})
    command = ["python", "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--node_rank=0"]
    assert hosts_of_ranks(rank_of(launcher, 3), environ, command) == expected


@pytest.mark.parametrize("world", ["", "%%%", "e30=", encode_world_info({"n0": [0]})])
def test_a_list_of_hosts_that_does_not_fit_the_job_is_no_list(world):
    command = ["python", f"--world_info={world}"]
    assert hosts_of_ranks(rank_of("deepspeed", 3), {}, command) == ()
