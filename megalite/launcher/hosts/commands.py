"""The commands of each backend, as data: this machine, ssh, torchrun, srun; those of mpirun and deepspeed besides."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megalite.errors import LaunchError
from megalite.launcher.hosts.backends import (
    Command,
    Job,
    Start,
    require_equal_hosts,
    require_first_slots,
)
from megalite.launcher.hosts.deepspeed_commands import DEEPSPEED_LAUNCHERS, deepspeed, pdsh_ssh_options
from megalite.launcher.hosts.job_hosts import Hosts, Placed
from megalite.launcher.hosts.mpi_commands import mpirun
from megalite.launcher.hosts.programs import Programs

# A host that does not answer ends ssh: at the start after 10 s, later after 30 s.
SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)


def local(job: Job, programs: Programs) -> Start:
    """Start `megalite train`, which forks its ranks itself."""
    _require_this_machine(job, "local")
    return Start((Command(job.rank_command, {**job.exported, **job.visible(job.hosts[0])}),))


def ssh(job: Job, programs: Programs) -> Start:
    """Start one ssh for each host, and there `megalite.launcher.hosts.node`, which starts the host's ranks."""
    commands = []
    for host in job.hosts:
        argv = [
            *(job.python, "-m", "megalite.launcher.hosts.node"),
            *("--first-rank", str(host.first_rank), "--ranks", str(len(host.slots))),
            *("--world-size", str(job.world_size), "--master", f"{job.master}:{job.port}"),
            *("--", *job.arguments),
        ]
        commands.append(_on_host(job, host, argv))
    return Start(tuple(commands))


def torchrun(job: Job, programs: Programs) -> Start:
    """Start one torchrun on each host, over ssh where there is a hostfile or a SLURM allocation."""
    # torchrun sets 1 and warns; megalite divides the cores among the ranks itself.
    threads = {"OMP_NUM_THREADS": job.exported.get("OMP_NUM_THREADS", "1")}
    commands = []
    for number, host in enumerate(job.hosts):
        where = ["--standalone"]
        if not job.local:
            where = [
                *("--nnodes", str(len(job.hosts)), "--node-rank", str(number)),
                *("--master-addr", job.master, "--master-port", str(job.port)),
            ]
        argv = [
            *(job.python, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(len(host.slots))),
            *(*job.extra, "-m", "megalite", *job.arguments),
        ]
        if job.local:
            commands.append(Command(tuple(argv), {**job.exported, **threads, **job.visible(host)}))
        else:
            commands.append(_on_host(job, host, argv, threads, options=()))
    return Start(tuple(commands))


def srun(job: Job, programs: Programs) -> Start:
    """Start all ranks as one step of the SLURM allocation. Its variables travel by their names."""
    if job.source != "slurm":
        raise LaunchError(
            "--backend srun needs a SLURM allocation (SLURM_JOB_ID is not set); start it within sbatch or salloc, or "
            "use --backend ssh"
        )
    require_first_slots(job, "srun")
    require_equal_hosts(job, "srun")
    exported = {**job.exported, "MASTER_ADDR": job.master, "MASTER_PORT": str(job.port)}
    argv = [
        *("srun", f"--nodes={len(job.hosts)}", f"--ntasks={job.world_size}"),
        *(f"--ntasks-per-node={len(job.hosts[0].slots)}", "--distribution=block"),
        f"--nodelist={','.join(host.name for host in job.hosts)}",
        *(f"--chdir={job.folder}", f"--export={','.join(exported)}"),
        # Within `srun --pty` the step shares the resources of that shell.
        *("--overlap", "--kill-on-bad-exit=1", "--input=none", *job.extra, *job.rank_command),
    ]
    return Start((Command(tuple(argv), exported),))


BACKENDS: Mapping[str, Callable[[Job, Programs], Start]] = {
    "local": local,
    "ssh": ssh,
    "torchrun": torchrun,
    "srun": srun,
    "mpirun": mpirun,
    **{name: partial(deepspeed, launcher=launcher) for name, launcher in DEEPSPEED_LAUNCHERS.items()},
}


def choose_backend(hosts: Hosts) -> str:
    """Return the backend of `--backend auto`."""
    # ssh rather than deepspeed: no lines of a launcher among the run's, and a killed rank ends the job sooner.
    return {"local": "local", "slurm": "srun", "hostfile": "ssh"}[hosts.source]


def ssh_options(backend: str, environ: Mapping[str, str], extra: Sequence[str]) -> Sequence[str]:
    """Return the options with which a backend calls ssh; extra: the user's arguments for it."""
    if backend == "deepspeed":
        return pdsh_ssh_options(environ, extra)
    return extra if backend == "ssh" else ()


def _require_this_machine(job: Job, backend: str) -> None:
    if not job.local:
        names = ", ".join(host.name for host in job.hosts)
        raise LaunchError(
            f"--backend {backend} starts ranks on this machine only, not on {names}; leave out --hostfile, or use "
            "--backend ssh"
        )


def _on_host(
    job: Job,
    host: Placed,
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    options: Sequence[str] | None = None,
) -> Command:
    """Return the ssh command that runs `argv` on a host, in the job's folder and with what travels."""
    if job.local:
        raise LaunchError("--backend ssh needs --hostfile or a SLURM allocation; use --backend local here")
    variables = {**job.exported, **(environ or {}), **job.visible(host)}
    setting = [f"{name}={value}" for name, value in variables.items()]
    remote = f"cd {shlex.quote(str(job.folder))} && exec {shlex.join(['env', *setting, *argv])}"
    user_options = job.extra if options is None else options
    return Command(("ssh", "-T", *SSH_OPTIONS, *user_options, "--", host.name, remote), host=host.name)
