"""The scripts in launch/: run with the real torchrun, and with stand-ins for srun and `python -m megalite launch`.

tests/launch/real/ runs them on several hosts with the real programs.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import megalite
from megalite.config.load import load_run
from megalite.config.sections.launch_section import LaunchSection
from tests.cli.test_launch_cli import RUN
from tests.support.selection import cases
from tests.support.waiting import PATIENCE, free_port

ROOT = Path(megalite.__file__).parents[1]
LAUNCH = ROOT / "launch"

# A megalite whose command line tells what it was asked and which rank it is; the rest is the real one.
SPEAKING_MAIN = """
import json, os, sys
from dataclasses import asdict
from megalite.launcher.rank.detect import rank_info
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


def test_the_real_torchrun_starts_every_rank_with_the_run(folder):
    run = launch(folder, "torchrun.sh", "--training.steps", "3", environ={"RUN": "a run.toml", "RANKS": "2"})
    assert run.returncode == 0, run.stderr
    lines = told(run)
    assert [line["arguments"] for line in lines] == [["train", "a run.toml", "--training.steps", "3"]] * 2
    places = [
        (line["rank"]["rank"], line["rank"]["local_rank"], line["rank"]["world_size"]) for line in lines
    ]
    assert places == [(0, 0, 2), (1, 1, 2)]
    assert {line["rank"]["launcher"] for line in lines} == {"torchrun"}


def test_the_older_launcher_of_torch_starts_megalite(tmp_path):
    """`python -m torch.distributed.launch` adds --local-rank=N to the arguments of each rank."""
    variables = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
    command = [*launcher, "--master-port", str(free_port()), "-m", "megalite", "--version"]
    run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    # Without a buffer a line's end is written by itself, maybe after the other rank's text.
    assert run.stdout.replace("\n", "") == f"megalite {megalite.__version__}" * 2


def test_a_failing_rank_fails_torchrun(folder):
    run = launch(folder, "torchrun.sh", environ={"RUN": "run.toml", "RANKS": "2", "EXIT_CODE": "2"})
    assert run.returncode != 0


SPEAK = 'printf "%s\\n" "$(basename "$0")" "$@"'
LAUNCHED = ["python", "-m", "megalite", "launch", "a run.toml"]


def launched(folder: Path, script: str, *arguments: str, **environ: str) -> list[str]:
    """Return the words behind `python -m megalite launch RUN` with which a script becomes that command."""
    stand_in(folder, "python", SPEAK)
    run = launch(folder, script, *arguments, environ={"RUN": "a run.toml", "PYTHON": "python", **environ})
    words = run.stdout.splitlines()
    assert words[:5] == LAUNCHED, run.stderr
    return words[5:]


BACKENDS = {
    "pdsh": "deepspeed",
    "openmpi": "deepspeed-openmpi",
    "mpich": "deepspeed-mpich",
    "impi": "deepspeed-impi",
}


@pytest.mark.parametrize("launcher", [*BACKENDS, "mpirun"])
def test_the_scripts_with_a_hostfile_are_megalite_launch(folder, launcher):
    """It alone reads hostfiles, asks the hosts, names them, and ends what a lost host leaves."""
    script, backend = "deepspeed.sh", BACKENDS.get(launcher, "mpirun")
    variables = {"LAUNCHER": launcher, "HOSTFILE": "my hosts", "INTERFACE": "eth1", "MASTER_ADDR": "10.0.0.1"}
    variables |= {"HF_HOME": "/my models", "MASTER_PORT": "4000"}
    if launcher == "mpirun":
        script = "mpirun.sh"
    words = launched(folder, script, "--training.steps", "3", "--", "--more", "x y", **variables)
    options = [*("--backend", backend), *("--port", "4000"), *("--hostfile", "my hosts")]
    if script == "deepspeed.sh":
        options = [*options[2:4], *options[:2], *options[4:]]
    options += ["--master", "10.0.0.1", "--interface", "eth1", "--export", "HF_HOME"]
    assert words == [*options, "--training.steps", "3", "--", "--more", "x y"]


@pytest.mark.parametrize(
    ("script", "environ", "options"),
    [
        ("deepspeed.sh", {}, ["--port", "29500", "--backend", "deepspeed", "--local"]),
        (
            "deepspeed.sh",
            {"RANKS": "2"},
            ["--port", "29500", "--backend", "deepspeed", "--local", "--slots", "2"],
        ),
        ("deepspeed.sh", {"LAUNCHER": "slurm"}, ["--port", "29500", "--backend", "deepspeed-slurm"]),
        ("mpirun.sh", {}, ["--backend", "mpirun", "--port", "29500", "--local"]),
        ("mpirun.sh", {"RANKS": "2"}, ["--backend", "mpirun", "--port", "29500", "--local", "--slots", "2"]),
    ],
)
def test_without_a_hostfile_the_ranks_are_on_this_machine_or_in_the_allocation(
    folder, script, environ, options
):
    assert launched(folder, script, **environ) == options


def test_the_variables_of_deepspeeds_own_file_travel(folder):
    (folder / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\n\n# a comment\n")
    words = launched(folder, "deepspeed.sh", HOSTFILE="hosts")
    # HOME and the working folder are the same here, so the file is there twice.
    assert words[-4:] == ["--env-file", f"{folder}/.deepspeed_env", "--env-file", ".deepspeed_env"]


@pytest.mark.parametrize(
    ("script", "environ", "message"),
    [
        ("deepspeed.sh", {"HOSTFILE": "hosts", "LAUNCHER": "ssh"}, "LAUNCHER: ssh is none of pdsh, openmpi"),
        (
            "deepspeed.sh",
            {"HOSTFILE": "hosts", "LAUNCHER": "slurm"},
            "LAUNCHER=slurm uses the nodes of the alloc",
        ),
        (
            "deepspeed.sh",
            {"HOSTFILE": "hosts", "RANKS": "4"},
            "RANKS: with HOSTFILE the run's layout is the number",
        ),
        (
            "mpirun.sh",
            {"HOSTFILE": "hosts", "RANKS": "4"},
            "RANKS: with HOSTFILE the run's layout is the number",
        ),
        ("torchrun.sh", {"NODES": "2"}, "MASTER: set it to the first"),
    ],
)
def test_what_several_nodes_need_is_asked_for(folder, script, environ, message):
    run = launch(folder, script, environ=environ)
    assert run.returncode == 2 and message in run.stderr


HOSTFILES = {
    "lots": ("n0 lots=8\n", "line 1, column 4: 'lots=8' is not a number of slots"),
    "an unknown key": ("n0 slots=4 foo=3\n", "line 1, column 12: 'foo=3' stands behind the slots"),
    "no slot": ("n0 slots=2\nn1 slots=0\n", "line 2, column 4: 'slots=0' leaves the host without ranks"),
    "twice": ("n0 slots=2\nN0 slots=2\n", "line 2, column 1: 'N0' is named twice, first in line 1"),
    "IPv6": ("fd00::1 slots=2\n", "line 1, column 1: 'fd00::1' is an IPv6 address"),
    "upper case": ("n0 SLOTS=2\n", "line 1, column 4: 'SLOTS=2' is not a number of slots"),
    "nothing": ("# n0 slots=2\n", "line 1: the file names no host"),
}


@pytest.mark.parametrize(
    ("script", "content"),
    cases(
        [(script, name) for name in HOSTFILES for script in ("deepspeed.sh", "mpirun.sh")],
        core=[("deepspeed.sh", "an unknown key"), ("mpirun.sh", "no slot")],
    ),
)
def test_a_bad_line_of_a_hostfile_is_refused_with_its_place(folder, script, content):
    text, message = HOSTFILES[content]
    (folder / "my hosts").write_text(text)
    run = launch_for_real(folder, script, HOSTFILE="my hosts")
    assert run.returncode == 2 and message in run.stderr, run.stderr
    assert "the hostfile my hosts" in run.stderr


def test_a_hostfile_with_tabs_comments_and_crlf_is_taken(folder):
    (folder / "hosts").write_bytes(b"n0\tslots=4\r\n\r\n# idle\r\nNode-B  slots=4 # the new one\r\n")
    stand_in(folder, "mpirun.mpich", "echo HYDRA build details")
    run = launch_for_real(folder, "mpirun.sh", "--dry-run", HOSTFILE="hosts", MPIRUN="mpirun.mpich")
    assert run.returncode == 0, run.stderr
    assert "mpirun.mpich -n 8 " in run.stdout and run.stdout.count("n0:4\nNode-B:4\nEND\n") == 1, run.stdout


def launch_for_real(
    folder: Path, script: str, *arguments: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with the real megalite in place of the one that speaks."""
    shutil.rmtree(folder / "megalite")
    (folder / "run.toml").write_text(RUN)
    return launch(folder, script, *arguments, environ={"RUN": "run.toml", "PYTHONPATH": str(ROOT), **environ})


def step_of(folder: Path, tasks: int) -> None:
    """An srun that runs its command `tasks` times with a step's variables, and returns the highest code."""
    stand_in(
        folder,
        "srun",
        f"""
while [[ $1 != bash ]]; do echo "option $1"; shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS={tasks} SLURM_STEP_TASKS_PER_NODE={tasks}
export SLURM_NODEID=0 SLURM_STEP_NODELIST=n0
highest=0
for ((task = 0; task < {tasks}; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" || {{ code=$?; ((code > highest)) && highest=$code; }}
done
exit $highest""",
    )
    stand_in(folder, "scontrol", 'echo "scontrol $*"')
    stand_in(folder, "squeue", 'echo "${STATE:-RUNNING}"')


def slurm(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {"RUN": "run.toml", "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "2"} | environ
    return launch(folder, "slurm.sbatch", "--training.steps", "3", environ=variables)


def notes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".megalite-slurm-17/*"))


@pytest.mark.parametrize(
    ("environ", "requeued", "returned"),
    [
        ({"EXIT_CODE": "0"}, "", 0),
        ({"EXIT_CODE": "75"}, "17", 0),
        ({"EXIT_CODE": "76"}, "17", 0),
        ({"EXIT_CODE": "1"}, "", 1),
        ({"EXIT_CODE": "143"}, "", 143),
        ({"EXIT_CODE": "75", "REQUEUE": "no"}, "", 75),
        ({"EXIT_CODE": "75", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}, "15_2", 0),
        # SLURM requeues it itself, and a cancelled one must not come back.
        ({"EXIT_CODE": "75", "STATE": "COMPLETING"}, "", 75),
        ({"EXIT_CODE": "76", "REQUEUE": "no"}, "", 76),
        ({"EXIT_CODE": "76", "STATE": "COMPLETING"}, "", 76),
    ],
)
def test_a_slurm_job_is_requeued_when_it_stopped_in_good_order(folder, environ, requeued, returned):
    step_of(folder, 2)
    run = slurm(folder, **environ)
    assert run.returncode == returned, run.stderr
    assert re.findall("scontrol requeue (.*)", run.stdout) == ([requeued] if requeued else [])
    lines = told(run)
    assert [line["arguments"] for line in lines] == [["train", "run.toml", "--training.steps", "3"]] * 2
    assert {line["rank"]["launcher"] for line in lines} == {"slurm"}
    assert bool(list(folder.glob(".megalite*"))) == bool(requeued)


def test_the_step_gets_all_variables_and_cores_and_ends_with_a_failed_rank(folder):
    step_of(folder, 1)
    options = re.findall("option (.*)", slurm(folder).stdout)
    assert options == ["--export=ALL", "--cpus-per-task", "2", "--kill-on-bad-exit=1"]


def test_a_finished_job_is_not_requeued_by_the_note_of_an_earlier_start(folder):
    """SLURM killed the batch shell of the start before it could read its note."""
    step_of(folder, 2)
    left = folder / ".megalite-slurm-17"
    left.mkdir()
    (left / "1.saved").touch()
    run = slurm(folder, SLURM_RESTART_COUNT="2")
    assert run.returncode == 0 and "requeue" not in run.stdout
    assert not left.exists()


def test_starts_without_a_step_do_not_go_on_for_ever(folder):
    """A --time that is shorter than the lead of --signal stops each start at once."""
    step_of(folder, 2)
    stops = [slurm(folder, EXIT_CODE="76", SLURM_RESTART_COUNT=str(start)) for start in range(3)]
    assert [run.returncode for run in stops] == [0, 0, 76]
    assert ["requeue" in run.stdout for run in stops] == [True, True, False]
    assert "3 starts in a row ended before their first step" in stops[2].stderr
    assert not list(folder.glob(".megalite*"))


def test_a_start_with_progress_forgets_the_ones_without(folder):
    step_of(folder, 2)
    for start, code in enumerate(("76", "76", "75", "76", "76")):
        run = slurm(folder, EXIT_CODE=code, SLURM_RESTART_COUNT=str(start))
        assert "scontrol requeue 17" in run.stdout, (start, run.stderr)
    # Another job with the same number, as after a reset of SLURM's counter, begins anew.
    assert notes(folder) == ["2.saved", "3.idle", "4.idle"]
    slurm(folder, EXIT_CODE="76")
    assert notes(folder) == ["0.idle"]


def test_a_signal_to_srun_itself_requeues_from_the_last_checkpoint(folder):
    """scancel --full --signal=TERM: srun kills the ranks at once."""
    step_of(folder, 2)
    stand_in(folder, "srun", "kill -TERM $PPID; exit 137")
    run = slurm(folder)
    assert run.returncode == 0 and "scontrol requeue 17" in run.stdout
    assert "SIGTERM reached srun, which killed the ranks" in run.stderr
    cancelled = slurm(folder, STATE="COMPLETING")
    assert cancelled.returncode == 143 and "requeue" not in cancelled.stdout


@pytest.mark.parametrize("environ", [{"REQUEUE": "no"}, {"STATE": "COMPLETING"}], ids=str)
def test_a_start_without_a_step_is_told_from_an_earlier_one_that_saved(folder, environ):
    step_of(folder, 2)
    assert slurm(folder, EXIT_CODE="75").returncode == 0 and notes(folder) == ["0.saved"]
    assert slurm(folder, EXIT_CODE="76", SLURM_RESTART_COUNT="1", **environ).returncode == 76


CONTAINERS = {
    "pyxis": ["srun", "--container-image", "a.sqsh", "--container-mounts", "{0}:{0}", "--container-workdir", "{0}"],
    "apptainer": ["rank", "apptainer", "exec", "--nv", "--bind", "{0}", "--pwd", "{0}", "a.sqsh"],
}  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
def test_ranks_run_in_the_container(folder, container):
    stand_in(folder, "srun", f"{SPEAK}; exit 1")
    run = slurm(folder, IMAGE="a.sqsh", CONTAINER=container, SLURM_GPUS_ON_NODE="2")
    words = " ".join(run.stdout.split("\n"))
    wanted = [word.format(folder) for word in CONTAINERS[container]]
    if container == "pyxis":
        wanted.insert(1, "--export=ALL --cpus-per-task 2")
    assert " ".join(wanted) in words
    assert words.endswith(f"{sys.executable} -m megalite train run.toml --training.steps 3 ")


def test_the_defaults_of_the_batch_script_fit_its_default_run():
    text = (LAUNCH / "slurm.sbatch").read_text()
    [run] = re.findall(r"^RUN=\$\{RUN:-(.*?)\}", text, re.MULTILINE)
    values = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    layout = load_run(ROOT / run, []).config.layout
    assert int(values["nodes"]) * int(values["ntasks-per-node"]) == layout.world_size


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
    run = slurm(folder)
    assert run.returncode == 0 and "scontrol requeue 17" in run.stdout, run.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck on this machine")
def test_the_scripts_pass_shellcheck():
    run = subprocess.run(["shellcheck", *LAUNCH.glob("*.s*")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.fixture(scope="module")
def jobset() -> dict:
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def test_the_jobset_makes_one_pod_a_node_that_restarts_when_it_stopped(jobset):
    spec = jobset["spec"]
    [job] = spec["replicatedJobs"]
    work = job["template"]["spec"]
    pod = work["template"]["spec"]
    [container] = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    # The first pod's name: that of the set, the job, the job's replica and the pod, below the headless service.
    name = jobset["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}" and job["replicas"] == 1
    assert spec["network"]["enableDNSHostnames"] is True
    assert work["completionMode"] == "Indexed"
    assert work["parallelism"] == work["completions"] == int(variables["NODES"])
    assert work["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > LaunchSection().grace_seconds
    codes = {"containerName": container["name"], "operator": "In", "values": [75]}
    assert {"action": "FailJob", "onExitCodes": codes} in work["podFailurePolicy"]["rules"]
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"] and spec["failurePolicy"]["maxRestarts"] > 0
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in pod["volumes"]}


def pod(folder: Path, jobset: dict, **environ: str) -> subprocess.Popen[str]:
    """Start the script of the second pod, with 2 of 4 ranks."""
    stand_in(folder, "python3", f'exec {shlex.quote(sys.executable)} "$@"')
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each["value"] for each in container["env"]} | {"RANKS": "2", "NODES": "2"}
    variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"} | environ
    return subprocess.Popen(
        [*container["command"], *container["args"]],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 75, 1])
def test_a_pod_starts_its_ranks_and_returns_their_code(folder, jobset, code):
    process = pod(folder, jobset, EXIT_CODE=str(code))
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    lines = sorted(json.loads(line)["rank"]["rank"] for line in output.splitlines())
    assert lines == [2, 3]


def test_a_pod_passes_sigterm_to_its_ranks_and_waits_for_them(folder, jobset):
    (folder / "megalite" / "__main__.py").write_text(
        """
import os, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
os.write(1, b"ready\\n")
while not told:
    time.sleep(0.02)
time.sleep(0.2)
sys.exit(75)
"""
    )
    process = pod(folder, jobset)
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "ready\n"]
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
