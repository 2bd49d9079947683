"""The command of the deepspeed launcher, with pdsh, Open MPI, MPICH, Intel MPI or SLURM below it.

DeepSpeed joins arguments and variables to a line for a remote shell, with quotes of its own. Everything is quoted here
so that it arrives unchanged, and refused where DeepSpeed would change it.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.errors import LaunchError
from megalite.launcher.hosts.backends import (
    Command,
    Job,
    Start,
    require_equal_hosts,
    require_first_slots,
    slots_file,
)
from megalite.launcher.hosts.mpi_commands import hydra_variables, require_root_allowed
from megalite.launcher.hosts.programs import Programs

# Backend -> the value of deepspeed's --launcher.
DEEPSPEED_LAUNCHERS: Mapping[str, str] = {
    "deepspeed": "pdsh",
    "deepspeed-openmpi": "openmpi",
    "deepspeed-mpich": "mpich",
    "deepspeed-impi": "impi",
    "deepspeed-slurm": "slurm",
}
_MPI_NEEDED = {"openmpi": "openmpi", "mpich": "mpich", "impi": "intel"}
_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)


def pdsh_ssh_options(environ: Mapping[str, str], extra: Sequence[str]) -> list[str]:
    """Return the options that pdsh gives to ssh: PDSH_SSH_ARGS_APPEND, and the port of deepspeed's --ssh_port."""
    port = list(_values_of("--ssh_port", extra)[0][-1:])
    return [
        *environ.get("PDSH_SSH_ARGS_APPEND", "").split(),
        *(word for each in port for word in ("-p", each)),
    ]


def deepspeed(job: Job, programs: Programs, launcher: str) -> Start:
    """Start all ranks with `deepspeed --launcher`. Raises LaunchError where DeepSpeed would start something else."""
    argv = [job.python, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
    if job.local and launcher == "pdsh":
        return _on_this_machine(job, argv)
    _require_plain_paths(job)
    hostfile = job.scratch / "hosts"
    argv += ["--launcher", launcher, "--hostfile", str(hostfile), "--force_multi", "--no_ssh_check"]
    argv += ["--master_addr", job.master, "--master_port", str(job.port)]
    if launcher == "pdsh":
        return _over_pdsh(job, programs, argv, hostfile)
    return _over_another(job, programs, argv, hostfile, launcher)


def _on_this_machine(job: Job, argv: list[str]) -> Start:
    visible = job.visible(job.hosts[0]) or ({"CUDA_VISIBLE_DEVICES": job.devices} if job.devices else {})
    # --num_gpus would overrule CUDA_VISIBLE_DEVICES; it is the number of ranks also without GPUs.
    slots = [] if visible else ["--num_gpus", str(job.world_size)]
    argv += ["--hostfile", "/dev/null", *slots, *job.extra, "--module", "megalite", *job.arguments]
    return Start((Command(tuple(argv), {**job.exported, **visible}),))


def _over_pdsh(job: Job, programs: Programs, argv: list[str], hostfile: Path) -> Start:
    if not programs.pdsh:
        raise LaunchError("--backend deepspeed: there is no pdsh on PATH; install it, or use --backend ssh")
    hosts = "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in job.hosts)
    if any(host.chosen for host in job.hosts):
        named = (f"{host.name}:{','.join(map(str, host.slots))}" for host in job.hosts)
        argv += ["--include", "@".join(named)]
    variables = job.scratch / "environment"
    lines = "".join(f"{name}={_in_double_quotes(name, value)}\n" for name, value in job.exported.items())
    argv += [*job.extra, "--module", "megalite", *map(_for_pdsh, job.arguments)]
    return Start(
        (Command(tuple(argv), {"DS_ENV_FILE": str(variables)}),), {hostfile: hosts, variables: lines}
    )


def _over_another(job: Job, programs: Programs, argv: list[str], hostfile: Path, launcher: str) -> Start:
    backend = f"deepspeed-{launcher}"
    require_first_slots(job, backend)
    needed = _MPI_NEEDED.get(launcher)
    if needed is not None and programs.mpi != needed:
        state = f"is of {programs.mpi}" if programs.mpi else "is missing"
        raise LaunchError(
            f"--backend {backend} runs mpirun, which {state}; put the mpirun of {launcher} first on PATH, or use "
            "--backend mpirun"
        )
    if launcher == "openmpi":
        require_root_allowed(programs, backend, job.extra)
    else:
        require_equal_hosts(job, backend)
    if launcher == "slurm" and job.source != "slurm":
        raise LaunchError(f"--backend {backend} needs a SLURM allocation; use --backend deepspeed")
    exported = {**job.exported, "MASTER_ADDR": job.master, "MASTER_PORT": str(job.port)}
    for name in [name for name in exported if name.startswith("PYTHON")]:
        if not _PLAIN.fullmatch(exported[name]):
            raise LaunchError(
                f"--backend {backend}: deepspeed would put quotes around {name} = {exported[name]!r}; use --backend "
                "mpirun or ssh"
            )
    options = {
        "openmpi": [word for name in exported for word in ("-x", name)],
        "mpich": hydra_variables(exported),
        "impi": hydra_variables(exported),
        "slurm": ["--ntasks-per-node", str(len(job.hosts[0].slots)), "--overlap", "--kill-on-bad-exit=1"],
    }[launcher]
    if launcher == "openmpi" and job.interface:
        options += ["--mca", "btl_tcp_if_include", job.interface]
    # The user's come behind ours. An argument that begins with - is taken for an option unless it follows =.
    texts, extra = _values_of("--launcher_args", job.extra)
    argv += [f"--launcher_args={' '.join([shlex.join(options), *texts])}", *extra]
    # DeepSpeed's runners for SLURM and MPICH have no working --module: -m is the interpreter's, the script pip's.
    scripts = {"slurm": ["--", "-m", "megalite"], "mpich": [str(Path(job.python).parent / "megalite")]}
    argv += [*scripts.get(launcher, ["--module", "megalite"]), *job.arguments]
    # DeepSpeed reads ~/.deepspeed_env by default; the options above carry everything.
    nothing = {"DS_ENV_FILE": str(job.scratch / "no-environment")}
    return Start((Command(tuple(argv), {**exported, **nothing}),), {hostfile: slots_file(job.hosts)})


def _values_of(option: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of an option, written `--option VALUE` or `--option=VALUE`, and the other arguments."""
    values, others, rest = list[str](), list[str](), list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name != option:
            others.append(name + equals + value)
        elif equals or rest:
            values.append(value if equals else rest.pop(0))
    return values, others


def _require_plain_paths(job: Job) -> None:
    for what, path in (("the working folder", str(job.folder)), ("the interpreter", job.python)):
        if not _PLAIN.fullmatch(path) or "%" in path:
            raise LaunchError(
                f"--backend deepspeed: {what} {path!r} has characters that deepspeed does not quote for the other "
                "hosts; use a path of letters, digits and ./-_, or --backend ssh"
            )


def _in_double_quotes(name: str, value: str) -> str:
    """Return a value for DeepSpeed's environment file, which puts double quotes around special characters only."""
    if value != value.strip():
        raise LaunchError(
            f"--backend deepspeed: {name} begins or ends with a space, which deepspeed removes; use --backend ssh"
        )
    if _PLAIN.fullmatch(value):
        return _percent(value)
    return _percent(re.sub(r'([\\"$`])', r"\\\1", value))


def _for_pdsh(argument: str) -> str:
    """Quote an argument for the remote shell; DeepSpeed itself puts double quotes around one with a space."""
    if " " not in argument:
        return _percent(shlex.quote(argument))
    return _percent(re.sub(r"([\\$`])", r"\\\1", argument))


def _percent(text: str) -> str:
    """Escape the % that pdsh replaces: %h is the host's name."""
    return text.replace("%", "%%")
