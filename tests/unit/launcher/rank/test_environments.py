"""Detection row by row: the variables that real launchers gave to 2 ranks on each of 2 hosts, as recorded from them."""

import json
from pathlib import Path

import pytest

from megalite.config.load import load_run
from megalite.errors import ConfigError, LaunchError
from megalite.launcher.rank.detect import RankInfo, rank_info
from megalite.launcher.rank.local_rank import without_local_rank
from tests.unit.config.runs import RUN, write_run

RECORDED = {
    path.stem: json.loads(path.read_text())
    for path in (Path(__file__).parents[3] / "launch" / "environments").glob("*.json")
}
# Recording -> launcher, master, whether the place of the host is known, whether the job has a name of its own.
EXPECTED = {
    "deepspeed-pdsh": ("deepspeed", "10.77.0.10", True, False),
    "deepspeed-mpich": ("the environment", "10.77.0.10", False, False),
    "deepspeed-openmpi": ("openmpi", "", False, True),
    "deepspeed-slurm": ("slurm", "n0", True, True),
    "torchrun": ("torchrun", "n0", True, True),
    "torchrun-in-srun": ("torchrun", "n0", True, True),
    "openmpi": ("openmpi", "", False, True),
    "openmpi-in-slurm": ("openmpi", "", False, True),
    "mpich": ("mpich", "", False, False),
    "mpich-in-slurm": ("mpich", "", False, False),
    "srun": ("slurm", "n0", True, True),
    "srun-pmi2": ("slurm", "n0", True, True),
}
SHELLS = ("batch-shell", "salloc-shell")


def variables(name: str) -> list[dict[str, str]]:
    return [process["variables"] for process in RECORDED[name]["processes"]]


def ranks(name: str) -> list[RankInfo]:
    found = [rank_info(each) for each in variables(name)]
    assert all(found), name
    return [each for each in found if each is not None]


def test_every_recording_is_expected_here():
    assert {*EXPECTED, *SHELLS} == set(RECORDED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_ranks_of_a_real_launcher_are_known(name):
    launcher, master, node_known, named = EXPECTED[name]
    found = ranks(name)
    assert sorted((each.rank, each.local_rank) for each in found) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for info, process in zip(found, RECORDED[name]["processes"], strict=True):
        assert (info.launcher, info.master_addr) == (launcher, master)
        assert (info.world_size, info.local_world_size, info.hosts) == (4, 2, 2)
        host = int(process["host"].removeprefix("n"))
        assert info.node_rank == (host if node_known else None)
        # Neighbouring ranks are on the same host, in the order of the hosts.
        assert info.rank // 2 == host or launcher == "torchrun"
    assert len({(each.master_port, each.job) for each in found}) == 1
    assert bool(found[0].job) is named


# Launcher -> the source of its number of ranks, and how it starts 3 or 8 ranks.
SOURCES = {
    "torchrun": ("torchrun started (WORLD_SIZE = 4)", "torchrun with --nnodes * --nproc-per-node = {}"),
    "deepspeed": (
        "deepspeed started (WORLD_SIZE = 4)",
        "{} slots in the hostfile, or deepspeed --num_gpus {} on one machine",
    ),
    "the environment": ("the environment names (WORLD_SIZE = 4)", "{} processes with WORLD_SIZE={}"),
    "openmpi": ("openmpi started (OMPI_COMM_WORLD_SIZE = 4)", "mpirun -n {}"),
    "mpich": ("mpich started (PMI_SIZE = 4)", "mpirun -n {}"),
    "slurm": ("slurm started (SLURM_STEP_NUM_TASKS = 4)", "srun --ntasks={}"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_file_for_another_number_of_ranks_names_the_variable_and_the_start(name, tmp_path):
    source, start = SOURCES[EXPECTED[name][0]]
    for flags, reason, counts, offer in (
        (
            ["--parallel.tensor", "2", "--parallel.data", "4"],
            "tensor 2 x pipeline 1 x data 4 = 8, not",
            8,
            "use",
        ),
        (
            ["--parallel.pipeline", "3", "--parallel.data", "1"],
            "tensor 1 x pipeline 3 x data 1 = 3, not",
            3,
            "",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            load_run(write_run(tmp_path, RUN), flags, ranks(name)[-1])
        told = str(caught.value)
        assert f"parallel.data: {reason} the 4 ranks that {source}; " in told
        assert f"start {counts} ranks: {start.replace('{}', str(counts))}" in told
        assert ('use "auto"' in told) is bool(offer), "auto helps only where the ranks make whole replicas"
    with pytest.raises(ConfigError) as caught:
        load_run(write_run(tmp_path, RUN), ["--parallel.pipeline", "3"], ranks(name)[-1])
    told = str(caught.value)
    assert (
        f"tensor 1 x pipeline 3 = 3 does not divide the 4 ranks that {source}; start 3 or 6 ranks, as with"
        in told
    )
    assert start.replace("{}", "3") in told


@pytest.mark.parametrize("name", EXPECTED)
def test_arguments_that_a_real_launcher_adds_agree_with_its_variables(name):
    for process in RECORDED[name]["processes"]:
        assert without_local_rank(["train", *process["arguments"]], process["variables"]) == ["train"]


@pytest.mark.parametrize("name", EXPECTED)
def test_any_variable_of_the_rank_that_is_lost_is_an_error_or_changes_nothing(name):
    told = variables(name)[-1]
    whole = rank_info(told)
    for lost in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "MASTER_PORT",
        "PMI_SIZE",
        "SLURM_LOCALID",
    ):
        if lost not in told:
            continue
        try:
            found = rank_info({key: value for key, value in told.items() if key != lost})
        except LaunchError as error:
            assert str(error).startswith(f"{lost} is not set") or "LOCAL_WORLD_SIZE" in str(error)
        else:
            assert found == whole


@pytest.mark.parametrize("name", SHELLS)
def test_the_shell_of_an_allocation_is_no_rank(name):
    [told] = variables(name)
    with pytest.raises(LaunchError) as caught:
        rank_info(told)
    assert "SLURM_NTASKS = 4, SLURM_JOB_NUM_NODES = 2, and none of its tasks" in str(caught.value)
    assert "srun python -m megalite train" in str(caught.value)


@pytest.mark.parametrize("name", ["srun", "srun-pmi2", "openmpi", "mpich"])
def test_a_rank_exported_in_the_users_shell_does_not_pass(name):
    stale = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    stale |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(
        LaunchError, match=r"^RANK = 0, WORLD_SIZE = 4, but .* is left from an earlier command"
    ):
        rank_info(variables(name)[-1] | stale)
    alone = stale | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(
        LaunchError, match=r"WORLD_SIZE = 1, .*: 4 separate jobs would train the same run; unset RANK"
    ):
        rank_info(variables(name)[-1] | alone)


@pytest.mark.parametrize("local", ["1", "2"])
def test_a_torchrun_in_each_task_that_does_not_know_the_others_is_refused(local):
    own = {
        "WORLD_SIZE": local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "RANK": "0",
    }
    told = variables("torchrun-in-srun")[-1] | own | {"LOCAL_RANK": "0"}
    with pytest.raises(
        LaunchError, match=r"2 separate jobs would train the same run; give torchrun --nnodes 2"
    ):
        rank_info(told)
    # After a restart torchrun may go on with the hosts that are left.
    if local == "2":
        assert rank_info(told | {"TORCHELASTIC_RESTART_COUNT": "1"}) is not None


def test_a_single_task_is_a_shell_unless_megalite_launch_started_it():
    told = variables("srun")[0] | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert rank_info(told) is None
    info = rank_info(told | {"MEGALITE_COORDINATOR": "10.77.0.10:4711/00ff"})
    assert info is not None and (info.rank, info.world_size, info.launcher) == (0, 1, "slurm")


def test_the_interactive_step_of_salloc_is_a_shell_too():
    told = variables("srun")[0] | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"}
    with pytest.raises(LaunchError, match=r"^this is the shell of SLURM job 1"):
        rank_info(told | {"SLURM_STEP_TASKS_PER_NODE": "1"})
