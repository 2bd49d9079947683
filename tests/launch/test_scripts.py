"""The scripts in launch/: run with the real torchrun and deepspeed, and with stand-ins for srun and mpirun."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import megalite
from tests.support.selection import cases

ROOT = Path(megalite.__file__).parents[1]
LAUNCH = ROOT / "launch"

# A megalite whose command line tells what it was asked and which rank it is; the rest is the real one.
SPEAKING_MAIN = """
import json, os, sys
from dataclasses import asdict
from megalite.launcher.detect import rank_info
line = json.dumps({"arguments": sys.argv[1:], "rank": asdict(rank_info())})
os.write(1, (line + "\\n").encode())
sys.exit(int(os.environ.get("EXIT_CODE", "0")))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with that megalite, and a `bin` for stand-ins."""
    package = tmp_path / "megalite"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'megalite')!r})\n")
    (package / "__main__.py").write_text(SPEAKING_MAIN)
    (tmp_path / "bin").mkdir()
    return tmp_path


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def launch(
    folder: Path, script: str, *arguments: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {
        "HOME": str(folder),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
    }
    return subprocess.run(
        [LAUNCH / script, *arguments] if script.endswith(".sh") else ["bash", LAUNCH / script, *arguments],
        cwd=folder,
        env=variables | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def told(run: subprocess.CompletedProcess[str]) -> list[dict]:
    """Return the output of each rank, in rank order."""
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"arguments"')]
    return sorted(lines, key=lambda line: line["rank"]["rank"])


@pytest.mark.parametrize("launcher", cases(["torchrun", "deepspeed"], core=["torchrun"]))
def test_the_real_launcher_starts_every_rank_with_the_run(folder, launcher):
    run = launch(
        folder, f"{launcher}.sh", "--training.steps", "3", environ={"RUN": "a run.toml", "RANKS": "2"}
    )
    assert run.returncode == 0, run.stderr
    lines = told(run)
    assert [line["arguments"] for line in lines] == [["train", "a run.toml", "--training.steps", "3"]] * 2
    places = [
        (line["rank"]["rank"], line["rank"]["local_rank"], line["rank"]["world_size"]) for line in lines
    ]
    assert places == [(0, 0, 2), (1, 1, 2)]
    assert {line["rank"]["launcher"] for line in lines} == {launcher}


@pytest.mark.parametrize("launcher", cases(["torchrun", "deepspeed"], core=["torchrun"]))
def test_a_failing_rank_fails_the_launcher(folder, launcher):
    run = launch(folder, f"{launcher}.sh", environ={"RUN": "run.toml", "RANKS": "2", "EXIT_CODE": "2"})
    assert run.returncode != 0


SPEAK = 'printf "%s\\n" "$(basename "$0")" "$@"'


def test_mpirun_gets_the_ranks_and_their_meeting_point(folder):
    stand_in(folder, "mpirun", SPEAK)
    (folder / "hosts").write_text((LAUNCH / "hostfile.example").read_text())
    environ = {"RUN": "run.toml", "RANKS": "16", "HOSTFILE": "hosts", "MASTER_ADDR": "node-a"}
    run = launch(folder, "mpirun.sh", "--training.steps", "3", environ=environ)
    command = [
        "mpirun",
        "-n",
        "16",
        "-x",
        "MASTER_ADDR",
        "-x",
        "MASTER_PORT",
        "-x",
        "PATH",
        "--hostfile",
        "hosts",
    ]
    command += [sys.executable, "-m", "megalite", "train", "run.toml", "--training.steps", "3"]
    assert run.stdout.splitlines() == command


@pytest.mark.parametrize(
    ("script", "environ", "message"),
    [
        ("deepspeed.sh", {"HOSTFILE": "absent"}, "HOSTFILE: absent cannot be read"),
        ("mpirun.sh", {"HOSTFILE": "absent"}, "HOSTFILE: absent cannot be read"),
        ("mpirun.sh", {"HOSTFILE": "/dev/null"}, "MASTER_ADDR: name the first node"),
        ("torchrun.sh", {"NODES": "2"}, "MASTER: set it to the first"),
    ],
)
def test_what_several_nodes_need_is_asked_for(folder, script, environ, message):
    run = launch(folder, script, environ=environ)
    assert run.returncode == 2 and message in run.stderr


def step_of(folder: Path, tasks: int) -> None:
    """An srun that runs its command `tasks` times with a step's variables, and returns the highest code."""
    stand_in(
        folder,
        "srun",
        f"""
[[ $1 == --cpus-per-task && $3 == --kill-on-bad-exit=1 ]] || exit 99
shift 3
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS={tasks} SLURM_STEP_TASKS_PER_NODE={tasks} SLURM_NODEID=0
highest=0
for ((task = 0; task < {tasks}; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" || {{ code=$?; ((code > highest)) && highest=$code; }}
done
exit $highest""",
    )
    stand_in(folder, "scontrol", 'echo "scontrol $*"')


@pytest.mark.parametrize(
    ("exit_code", "requeued", "returned"),
    [("0", False, 0), ("75", True, 0), ("1", False, 1), ("143", False, 143)],
)
def test_a_slurm_job_is_requeued_when_it_stopped_in_good_order(folder, exit_code, requeued, returned):
    step_of(folder, 2)
    environ = {"RUN": "run.toml", "SLURM_JOB_ID": "17", "EXIT_CODE": exit_code, "SLURM_CPUS_PER_TASK": "2"}
    run = launch(folder, "slurm.sbatch", "--training.steps", "3", environ=environ)
    assert run.returncode == returned, run.stderr
    assert ("scontrol requeue 17" in run.stdout) == requeued
    lines = told(run)
    assert [line["arguments"] for line in lines] == [["train", "run.toml", "--training.steps", "3"]] * 2
    assert {line["rank"]["launcher"] for line in lines} == {"slurm"}
    assert not list(folder.glob(".megalite*"))


def test_the_shell_around_a_slurm_rank_outlives_the_signal_that_the_rank_answers(folder):
    (folder / "megalite" / "__main__.py").write_text(
        """
import os, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
os.kill(os.getppid(), signal.SIGTERM)  # SLURM signals every process of the step
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
sys.exit(75 if told else 1)
"""
    )
    step_of(folder, 1)
    run = launch(folder, "slurm.sbatch", environ={"RUN": "run.toml", "SLURM_JOB_ID": "17"})
    assert run.returncode == 0 and "scontrol requeue 17" in run.stdout, run.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck on this machine")
def test_the_scripts_pass_shellcheck():
    run = subprocess.run(["shellcheck", *LAUNCH.glob("*.s*")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
