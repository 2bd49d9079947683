"""megalite launch: what it decides before a process starts, what it prints, and what it refuses."""

import os
import shlex
import sys

import pytest

from megalite.cli import main
from tests.support import reported_faults as faults
from tests.support.museum import exhibit

RUN = """\
[model]
preset = "tiny"
[parallel]
tensor = 2
pipeline = 2
[training]
steps = 10
sequence_length = 16
micro_batch_size = 2
global_batch_size = 8
[data]
source = "stdlib"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a run and two hosts; no variable of a launcher is set."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "hosts").write_text("n0 slots=2\nn1 slots=2\n")
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "RANK", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def printed(capsys, *arguments: str) -> list[str]:
    assert main(["launch", *arguments, "--dry-run"]) == 0
    return capsys.readouterr().out.splitlines()


def refusal(capsys, *arguments: str) -> str:
    """Return the error on wrong input; nothing is printed before it."""
    assert main(["launch", *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err


def test_a_dry_run_prints_the_plan_and_a_command_for_each_host(folder, capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    lines = printed(capsys, "run.toml", "--hostfile", "hosts", "--backend", "ssh", "--training.steps", "3")
    assert lines[:3] == [
        "4 ranks: tensor 2 x pipeline 2 x data 1, on 2 hosts of the hostfile hosts, with --backend ssh",
        "  n0  ranks 0-1",
        "  n1  ranks 2-3",
    ]
    assert "NCCL_DEBUG" in lines[3] and "  NCCL_DEBUG=INFO" in lines
    assert lines[-4] == "# n0" and lines[-2] == "# n1"
    for line, host, first in ((lines[-3], "n0", "0"), (lines[-1], "n1", "2")):
        *ssh, remote = shlex.split(line)
        assert ssh[0] == "ssh" and ssh[-1] == host
        words = shlex.split(remote)
        assert words[:2] == ["cd", str(folder)] and "NCCL_DEBUG=INFO" in words
        assert words[words.index(sys.executable) :][:5] == [
            *(sys.executable, "-m", "megalite.launcher.hosts.node"),
            *("--first-rank", first),
        ]
        assert words[-5:] == ["--", "train", "run.toml", "--training.steps", "3"]


@pytest.mark.parametrize("backend", ["ssh", "torchrun"])
def test_a_single_included_host_runs_the_job_also_if_it_is_another_one(folder, capsys, backend):
    """`deepspeed --include n1` typed on n0 runs on n0."""
    lines = printed(
        capsys,
        *(
            "run.toml",
            "--hostfile",
            "hosts",
            "--include",
            "n1",
            "--backend",
            backend,
            "--parallel.pipeline",
            "1",
        ),
    )
    commands = [line for line in lines if line.startswith("ssh ")]
    assert len(commands) == 1 and " n1 " in commands[0] and "n0" not in commands[0], lines


def test_a_layout_whose_tensor_axis_spans_hosts_is_warned_of(folder, capsys):
    arguments = ("run.toml", "--hostfile", "hosts", "--backend", "ssh")
    lines = printed(capsys, *arguments, "--parallel.tensor", "4", "--parallel.pipeline", "1")
    [warning] = [line for line in lines if line.startswith("warning: ")]
    assert "1 of 1 tensor-parallel groups span hosts (ranks 0 on n0, 1 on n0, 2 on n1, 3 on n1)" in warning
    assert warning.endswith("use parallel.tensor = 2, or start a multiple of 4 ranks on each host")
    assert not any(line.startswith("warning: ") for line in printed(capsys, *arguments))


def test_secrets_are_not_printed(folder, capsys):
    for backend in ("ssh", "torchrun"):
        lines = printed(
            capsys, "run.toml", "--hostfile", "hosts", "--backend", backend, "--export", "HF_TOKEN=hf_abc"
        )
        assert "  HF_TOKEN='(not shown)'" in lines
        assert "hf_abc" not in "\n".join(lines)


def test_data_auto_takes_the_slots_and_says_which_stay_idle(folder, capsys):
    (folder / "hosts").write_text("n0 slots=4\nn1 slots=6\nn2 slots=3\n")
    lines = printed(
        capsys, "run.toml", "--hostfile", "hosts", "--backend", "ssh", "--training.global_batch_size=12"
    )
    assert lines[0].startswith("12 ranks: tensor 2 x pipeline 2 x data 3, on 3 hosts")
    assert "idle: 1 of 3 slots of n2" in lines


def test_the_backend_of_this_machine_is_the_train_command(folder, capsys):
    lines = printed(capsys, "run.toml", "--export", "A=b c")
    assert lines[0].endswith("on this machine, with --backend local")
    assert lines[-1] == f"A='b c' {shlex.quote(sys.executable)} -m megalite train run.toml"


def test_the_arguments_of_the_backend_stand_behind_two_dashes(folder, capsys):
    lines = printed(capsys, "run.toml", "--backend", "torchrun", "--dry-run", "--interface", "eth0")
    assert "GLOO_SOCKET_IFNAME=eth0" in lines[-1] and "NCCL_SOCKET_IFNAME==eth0" in lines[-1]
    assert main(["launch", "run.toml", "--backend", "torchrun", "--dry-run", "--", "--tee", "3"]) == 0
    assert "--nproc-per-node 4 --tee 3 -m megalite train run.toml" in capsys.readouterr().out


def test_the_first_host_can_have_another_address_and_an_allocation_can_be_left_aside(
    folder, capsys, monkeypatch
):
    hosts = ("run.toml", "--hostfile", "hosts", "--backend", "ssh")
    assert "--master 10.0.0.1:4000 " in printed(capsys, *hosts, "--master", "10.0.0.1", "--port", "4000")[-1]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert "on 2 hosts of the SLURM job 7" in printed(capsys, "run.toml")[0]
    assert (
        "on this machine, with --backend torchrun"
        in printed(capsys, "run.toml", "--local", "--backend", "torchrun")[0]
    )


def test_an_mpirun_that_is_not_there_is_named(folder, capsys, monkeypatch):
    monkeypatch.setenv("MPIRUN", "mpirun.absent")
    assert "there is no mpirun.absent (MPIRUN)" in refusal(capsys, "run.toml", "--backend", "mpirun")


@exhibit(
    "DeepSpeed#4370",
    subject="launch",
    there="the options for ssh in PDSH_SSH_ARGS_APPEND were overwritten",
    here="they are kept, and used for every question to a host",
    fault=faults.SSH_OPTIONS_ARE_REPLACED,
    case="deepspeed--p 2222 -i key-more1-options1",
)
@pytest.mark.parametrize(
    ("backend", "append", "more", "options"),
    [
        ("ssh", "", ["-p", "2222"], ["-p", "2222"]),
        ("deepspeed", "-p 2222 -i key", [], ["-p", "2222", "-i", "key"]),
        ("deepspeed", "-i key", ["--ssh_port", "2222"], ["-i", "key", "-p", "2222"]),
        ("deepspeed", "", ["--ssh_port=2222"], ["-p", "2222"]),
        ("torchrun", "-p 2222", ["--tee", "3"], []),
    ],
)
def test_the_hosts_are_asked_over_the_ssh_that_the_backend_uses(
    folder, capsys, monkeypatch, backend, append, more, options
):
    """A cluster whose sshd listens at another port: the ranks would get there, so the question has to."""
    (folder / "bin").mkdir()
    for name, text in (("ssh", f'echo "$@" >> {folder}/asked; exit 255'), ("pdsh", "exit 1")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", append)
    monkeypatch.setattr("sys.executable", "/opt/python")  # a path with a space is refused for deepspeed
    assert main(["launch", "run.toml", "--hostfile", "hosts", "--backend", backend, "--", *more]) == 2
    assert "n1 did not pass the preflight" in capsys.readouterr().err
    asked = (folder / "asked").read_text().splitlines()
    common = "-o BatchMode=yes -o ConnectTimeout=10"
    ours = sorted(line.partition(" -- ")[0].removeprefix(common).strip() for line in asked)
    assert ours == [" ".join(options)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.toml"], "no.toml"),
        (["run.toml", "--training.stepz", "3"], "did you mean training.steps?"),
        (["run.toml", "--hostfile", "no"], "--hostfile no: there is no such file"),
        (["run.toml", "--hostfile", "hosts", "--include", "n7"], "n7: is not a host of the hostfile hosts"),
        (["run.toml", "--hostfile", "hosts", "--parallel.data", "2"], "the run has 8 ranks"),
        (["run.toml", "--hostfile", "hosts", "--backend", "local", "--hosts", "3"], "--hosts 3"),
        (["run.toml", "--hostfile", "hosts", "--backend", "srun"], "needs a SLURM allocation"),
        (["run.toml", "--export", "NOT_SET"], "--export NOT_SET: the variable is not set"),
        (["run.toml", "--env-file", "no"], "--env-file no: the file cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_told_before_anything_starts(folder, capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: RUN.toml"),
        (["run.toml", "--backend", "pdsh"], "invalid choice: 'pdsh'"),
        (["run.toml", "--slots", "0"], "'0' is not a whole number of 1 or more"),
        (["run.toml", "--hostfil", "hosts"], "unrecognized arguments: --hostfil hosts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_told(folder, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["launch", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_rank_of_another_launcher_does_not_start_the_job_again(folder, capsys, monkeypatch):
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**ranks, "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert "this is rank 1 of 4" in refusal(capsys, "run.toml")


def test_help_is_one_screen(capsys):
    assert main(["launch", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 90
    assert lines[0].startswith("usage: megalite launch RUN.toml")
