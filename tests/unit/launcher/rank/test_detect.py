"""Every launcher's variables as it really sets them, and what is wrong with them said by name."""

import os
import socket
from dataclasses import replace

import pytest

from megalite.errors import LaunchError
from megalite.launcher.rank.detect import RankInfo, local_rank_infos, rank_info
from megalite.launcher.rank.slurm import node_names, tasks_per_node

# As seen in rank 5 of 8 (the second of two nodes) by a script that prints its environment.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "GROUP_RANK": "1",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400",
}
DEEPSPEED = {
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "LOCAL_SIZE": "4",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[06-08]",
    "SLURMD_NODENAME": "node08",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "MASTER_ADDR": "node-a",
}
MPICH = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "node-a",
}
EXPLICIT = {name: TORCHRUN[name] for name in TORCHRUN if not name.startswith(("TORCHELASTIC", "GROUP"))}
FIVE = RankInfo(5, 8, 1, 4, "node-a", 29500, "", socket.gethostname(), node_rank=1, hosts=2)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, replace(FIVE, launcher="torchrun", master_port=29400, job="torchrun none")),
        (DEEPSPEED, replace(FIVE, launcher="deepspeed")),
        (EXPLICIT, replace(FIVE, launcher="the environment", master_port=29400, node_rank=None)),
        (OPENMPI, replace(FIVE, launcher="openmpi", node_rank=None)),
        (MPICH, replace(FIVE, launcher="mpich", node_rank=None)),
        (
            SLURM,
            replace(
                FIVE,
                launcher="slurm",
                master_addr="node07",
                master_port=24567,
                node="node08",
                job="slurm 1234567.0.0",
            ),
        ),
    ],
)
def test_each_launcher_is_known_by_its_variables(variables, expected):
    assert rank_info(variables) == expected


def test_nobody_started_a_bare_process_or_a_step_of_one_task():
    assert rank_info({"PATH": "/bin", "MASTER_ADDR": "node-a", "OMP_NUM_THREADS": "4"}) is None
    assert rank_info(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert rank_info({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}) is None


def test_the_environment_of_this_process_is_the_default(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "PMI", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    for name, value in EXPLICIT.items():
        monkeypatch.setenv(name, value)
    found = rank_info()
    assert found is not None and found.rank == 5


@pytest.mark.parametrize(
    ("inner", "outer", "launcher"),
    [
        (TORCHRUN, SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "torchrun"),
        (DEEPSPEED, OPENMPI | {"OMPI_COMM_WORLD_SIZE": "2"}, "deepspeed"),
        (OPENMPI, SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "openmpi"),
        (MPICH, SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "mpich"),
        (SLURM, {"PMI_RANK": "5", "PMI_SIZE": "8"}, "slurm"),
    ],
)
def test_the_launcher_nearest_to_the_rank_decides(inner, outer, launcher):
    found = rank_info(outer | inner)
    assert found is not None and (found.launcher, found.rank, found.world_size) == (launcher, 5, 8)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [(TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    + [(DEEPSPEED, "MASTER_PORT"), (EXPLICIT, "LOCAL_RANK"), (EXPLICIT, "LOCAL_WORLD_SIZE")]
    + [(OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"), (MPICH, "PMI_SIZE"), (MPICH, "MPI_LOCALRANKID")]
    + [(SLURM, name) for name in ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")],
)
def test_a_missing_variable_is_named_and_never_guessed(variables, missing):
    with pytest.raises(LaunchError, match=f"^{missing} is not set"):
        rank_info({name: value for name, value in variables.items() if name != missing})


@pytest.mark.parametrize(
    ("variables", "wrong", "message"),
    [
        (TORCHRUN, {"RANK": "8"}, "RANK = 8 does not fit WORLD_SIZE = 8"),
        (TORCHRUN, {"RANK": "-1"}, "RANK = '-1' is not a whole number"),
        (TORCHRUN, {"RANK": "٣"}, "RANK = '٣' is not a whole number"),
        (DEEPSPEED, {"LOCAL_RANK": "4"}, "LOCAL_RANK = 4 does not fit LOCAL_SIZE = 4"),
        (EXPLICIT, {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = 9 does not fit WORLD_SIZE = 8"),
        (EXPLICIT, {"MASTER_PORT": "70000"}, "MASTER_PORT = 70000 is not a port"),
        (EXPLICIT, {"MASTER_ADDR": " "}, "MASTER_ADDR is not set"),
        (OPENMPI, {"OMPI_COMM_WORLD_SIZE": "eight"}, "OMPI_COMM_WORLD_SIZE = 'eight'"),
        (
            SLURM,
            {"SLURM_STEP_TASKS_PER_NODE": "4"},
            "SLURM_STEP_TASKS_PER_NODE = '4' does not fit SLURM_NODEID = 1",
        ),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE = '4x2' is not a list"),
        (SLURM, {"SLURM_STEP_NODELIST": "node[7-"}, "SLURM_STEP_NODELIST = 'node"),
        (SLURM, {"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID = 'x' is not a whole number"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(variables, wrong, message):
    with pytest.raises(LaunchError) as caught:
        rank_info(variables | wrong)
    assert str(caught.value).startswith(message)


def test_a_stale_rank_beside_a_launcher_of_the_same_world_is_refused():
    with pytest.raises(
        LaunchError, match=r"^RANK = 5, WORLD_SIZE = 8, but SLURM_PROCID = 6, SLURM_STEP_NUM_TASKS = 8"
    ):
        rank_info(EXPLICIT | SLURM | {"SLURM_PROCID": "6"})
    with pytest.raises(
        LaunchError,
        match=r"but OMPI_COMM_WORLD_RANK = 2, OMPI_COMM_WORLD_SIZE = 8: .* unset RANK, WORLD_SIZE",
    ):
        rank_info(EXPLICIT | OPENMPI | {"OMPI_COMM_WORLD_RANK": "2"})
    assert rank_info(EXPLICIT | SLURM) is not None


def test_the_shell_of_a_batch_job_is_told_from_its_tasks():
    shell = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "1"}
    with pytest.raises(LaunchError, match=r"SLURM_NTASKS = 4, .*start the ranks with srun"):
        rank_info(shell)
    with pytest.raises(LaunchError, match="SLURM_JOB_NUM_NODES = 2"):
        rank_info(shell | {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "2"})


@pytest.mark.parametrize("variables", [OPENMPI, MPICH])
def test_mpi_leaves_the_master_open_but_on_a_single_node(variables):
    without = {name: value for name, value in variables.items() if name != "MASTER_ADDR"}
    found = rank_info(without)
    assert found is not None and found.master_addr == ""
    local = "MPI_LOCALNRANKS" if "PMI_RANK" in without else "OMPI_COMM_WORLD_LOCAL_SIZE"
    found = rank_info(without | {local: "8"})
    assert found is not None and (found.master_addr, found.master_port) == ("127.0.0.1", 29500)
    if "OMPI_COMM_WORLD_RANK" in without:  # two mpiruns on one host do not meet at the same port
        ports = {rank_info(without | {local: "8", "PMIX_NAMESPACE": name}).master_port for name in ("7", "8")}
        assert ports == {20007, 20008}


def test_slurm_finds_the_master_unless_it_is_named():
    found = rank_info(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert found is not None and (found.master_addr, found.master_port) == ("10.0.0.1", 4000)
    one_node = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    found = rank_info(one_node)
    assert found is not None and found.master_addr == "127.0.0.1"
    later_step = rank_info(SLURM | {"SLURM_STEP_ID": "3"})
    assert later_step is not None and later_step.master_port == 24570


def test_every_rank_of_an_uneven_slurm_step_finds_its_node():
    sizes = []
    for node in range(4):
        found = rank_info(
            SLURM
            | {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": str(node)}
            | {"SLURM_LOCALID": "0"}
        )
        assert found is not None
        sizes.append(found.local_world_size)
    assert sizes == [2, 2, 2, 1]


def test_compact_lists_are_expanded():
    assert node_names("node1") == ("node1",)
    assert node_names("gpu[08-10,12],login") == ("gpu08", "gpu09", "gpu10", "gpu12", "login")
    assert node_names("r[1-2]n[3,05-06]-ib") == tuple(f"r{r}n{n}-ib" for r in "12" for n in ("3", "05", "06"))
    assert node_names("a-b.c,d[99-101]") == ("a-b.c", "d99", "d100", "d101")
    assert tasks_per_node("2(x3),1") == (2, 2, 2, 1)


@pytest.mark.parametrize(
    "compact", ["", "n[1-", "n[]", "n[2-1]", "n[1-2-3]", "n[a-b]", "a,,b", "a b", "n]", "a,"]
)
def test_a_damaged_node_list_is_refused(compact):
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST"):
        node_names(compact)


def test_local_ranks_meet_over_a_file_and_never_on_the_network(tmp_path):
    infos = local_rank_infos(3, tmp_path / "store")
    assert [info.rank for info in infos] == [info.local_rank for info in infos] == [0, 1, 2]
    assert {(info.rendezvous, info.master_addr) for info in infos} == {
        (f"file://{tmp_path}/store", "127.0.0.1")
    }
