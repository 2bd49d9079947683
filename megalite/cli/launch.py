"""megalite launch: start a run's ranks on all hosts with one command, and supervise them."""

import argparse
import os
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megalite.cli.arguments import Parser, options_and_settings, whole_number
from megalite.cli.remaining_hosts import remaining_hosts
from megalite.cli.results import report
from megalite.cli.run_status import report_run
from megalite.config.load import LoadedRun, load_run
from megalite.config.smaller_layout import smaller_layout
from megalite.errors import LaunchError, RankFailure
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.messages import counted_ranks
from megalite.launcher.control.rank_states import CoordinatedJob
from megalite.launcher.control.starter_folder import starter_folder
from megalite.launcher.hosts.backends import Job, shell_lines
from megalite.launcher.hosts.commands import BACKENDS, choose_backend, ssh_options
from megalite.launcher.hosts.exported_variables import named_variables, shown, travelling, without_secrets
from megalite.launcher.hosts.host_report import HostRequirements
from megalite.launcher.hosts.job_hosts import HostOptions, Hosts, Placed, find_hosts, place_ranks
from megalite.launcher.hosts.preflight import SECONDS, Preflight, preflight, transport_to
from megalite.launcher.hosts.programs import Programs, find_programs
from megalite.launcher.hosts.restarts import Ended, run_with_restarts
from megalite.launcher.hosts.supervise import Result, listen, supervise
from megalite.launcher.rank.address import named_interface
from megalite.launcher.rank.detect import DEFAULT_PORT, rank_info
from megalite.launcher.rank.environment import variables
from megalite.launcher.rank.placement import placement_warning
from megalite.launcher.rank.slurm import in_shell
from megalite.planner.experts import exchange_of_a_token
from megalite.planner.machine import least_memory
from megalite.train.run_progress import attempt_end, has_own_state, published_step, records_mark

_HELP = """\
usage: megalite launch RUN.toml [options] [--section.key value ...] [-- MORE]

Check the hosts, start a run's ranks on them, show the first cause of a failure.
The hosts are those of a hostfile, of the SLURM allocation, or this machine.
MORE arguments go to the backend.

  megalite launch run.toml --hostfile hosts --training.steps 500
  megalite launch run.toml --hostfile hosts --backend ssh --dry-run

  --hostfile FILE        lines of NAME slots=N; a slot runs one rank
  --include HOSTS        only these: NAME[:SLOT,SLOT][@NAME...]; or --exclude
  --hosts N, --slots N   the first N hosts, the first N slots of each
  --local                this machine, also in a SLURM allocation
  --backend NAME         auto, local, ssh, torchrun, srun, mpirun, deepspeed,
                         deepspeed-openmpi, -mpich, -impi, -slurm
  --interface NAME       network interface between the hosts
  --master NAME          first host, as the others reach it (as in the hostfile)
  --port N               port of the rendezvous on the first host (29500)
  --export NAME[=VALUE]  variable for the ranks; --env-file FILE: lines of them
  --restarts N           start a failed job again from its last checkpoint (0)
  --allow-fewer          a smaller layout, if a restart finds fewer hosts
  --dry-run              print each command and the variables; start nothing
  --no-preflight         no check of the hosts; --preflight-seconds N: its limit
  -h, --help             this text; megalite help train SECTION: the settings
"""
_RANKS_SHOWN = 64


@dataclass(frozen=True)
class _Plan:
    """All that is decided before a process starts."""

    loaded: LoadedRun
    available: Hosts
    hosts: tuple[Placed, ...]
    idle: tuple[str, ...]
    backend: str
    programs: Programs
    job: Job


def run(arguments: Sequence[str]) -> int:
    """Run `megalite launch`; return the job's exit code: 0, 75 stopped to be resumed, 2 wrong input, 130 Ctrl-C, 1."""
    own, extra = _divided(arguments)
    if "-h" in own or "--help" in own:
        print(_HELP, end="")
        return 0
    parser = command_parser()
    known, overrides = _separated(own, parser)
    options = parser.parse_args(known)
    environ = variables()
    _refuse_rank(environ)
    plan = _plan(options, overrides, extra, environ)
    report(
        layout=plan.loaded.config.layout.named_sizes,
        backend=plan.backend,
        hosts=[{"name": host.name, "ranks": list(host.ranks)} for host in plan.hosts],
        idle=plan.idle,
        variables=shown(plan.job.exported),
    )
    for line in _plan_lines(plan):
        print(line, flush=True)
    if options.dry_run:
        lines = list(_dry_lines(plan))
        report(commands=lines[lines.index("") + 1 :])
        print(*lines, sep="\n")
        return 0

    run_folder = plan.job.folder / plan.loaded.config.run.folder
    older = published_step(run_folder)
    step: int | None = None

    def attempt(number: int) -> Ended:
        nonlocal step
        kept = number > 0 and has_own_state(plan.loaded.config, run_folder, older, step)
        current = plan if number == 0 else _plan_again(plan, options, overrides, number, kept)
        if number == 0 and options.preflight:
            _check_hosts(plan, options)
        before = records_mark(run_folder)
        result = _attempt(current, environ)
        ended = attempt_end(result.exit_code, result.text, result.step, run_folder, before)
        step = step if ended.step is None else ended.step
        copied = plan.loaded.config.checkpoint.in_memory_every > 0
        # megalite train restarts its ranks and reports failures itself; only a killed megalite train has a cause here.
        told_by_train = bool(_own_restarts(options, plan.backend)) and not result.text
        return replace(ended, copied=copied, final=result.asked or told_by_train)

    ended = run_with_restarts(attempt, options.restarts, _say)
    report_run(run_folder, plan.loaded.notes, ended.exit_code)
    if ended.cause:
        raise RankFailure(ended.cause, ended.exit_code)
    return ended.exit_code


def _divided(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the arguments before and behind --."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:place]), tuple(arguments[place + 1 :])


def command_parser() -> Parser:
    parser = Parser(prog="megalite launch", add_help=False, run_settings=True)
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    parser.add_argument("--hostfile", type=Path)
    parser.add_argument("--include", default="")
    parser.add_argument("--exclude", default="")
    parser.add_argument("--hosts", type=whole_number(1))
    parser.add_argument("--slots", type=whole_number(1))
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    parser.add_argument("--interface", default="")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--master", default="")
    parser.add_argument("--port", type=whole_number(1, 65535), default=DEFAULT_PORT)
    parser.add_argument("--export", action="append", default=[])
    parser.add_argument("--env-file", action="append", type=Path, default=[])
    parser.add_argument("--preflight-seconds", type=float, default=SECONDS)
    parser.add_argument("--no-preflight", dest="preflight", action="store_false")
    parser.add_argument("--restarts", type=whole_number(0), default=0)
    parser.add_argument("--allow-fewer", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    return parser


def _separated(arguments: Sequence[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Return (this command's own arguments, the settings of the run)."""
    # Not by options_and_settings: --interface is also the name of a setting.
    own = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    known: list[str] = []
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.split("=")[0] in own:
            known.append(argument)
            if "=" not in argument and own[argument] and rest:
                known.append(rest.pop(0))
        else:
            others.append(argument)
            # The value of a setting may be spelled like one of the options.
            if argument.startswith("--") and "=" not in argument and rest and not rest[0].startswith("--"):
                others.append(rest.pop(0))
    more, overrides = options_and_settings(others)
    return [*known, *more], overrides


def _refuse_rank(environ: Mapping[str, str]) -> None:
    """Raise LaunchError in a rank of another launcher: each rank would start the whole job."""
    info = None if in_shell(environ) else rank_info(environ)
    if info is not None and info.world_size > 1:
        raise LaunchError(
            f"this is rank {info.rank} of {info.world_size} of {info.launcher}, and megalite launch starts all ranks "
            "itself; use megalite train in ranks, or start megalite launch once"
        )


def _plan(
    options: argparse.Namespace, overrides: Sequence[str], extra: tuple[str, ...], environ: Mapping[str, str]
) -> _Plan:
    """Load the run and decide hosts, ranks and backend. Raises ConfigError and LaunchError; starts nothing."""
    named = named_variables(options.export, options.env_file, environ)
    if options.interface:
        named = {**named_interface(options.interface), **named}
    chosen = HostOptions(
        hostfile=options.hostfile,
        include=options.include,
        exclude=options.exclude,
        hosts=options.hosts,
        slots=options.slots,
        local=options.local or options.backend == "local",
    )
    available = find_hosts(chosen, environ)
    # Another host's folders cannot be seen from here; its ranks check them.
    here = available.source != "hostfile" or available.hosts[0].name in ("localhost", socket.gethostname())
    loaded = load_run(options.run_file, overrides, slots=available.slots, places=here)
    hosts, idle = place_ranks(available, loaded.config.layout.world_size)
    backend = choose_backend(available) if options.backend == "auto" else options.backend
    programs = find_programs(backend, environ)
    job = Job(
        source=available.source,
        hosts=hosts,
        arguments=("train", str(options.run_file), *overrides, *_own_restarts(options, backend)),
        folder=Path.cwd(),
        python=sys.executable,
        exported=named if backend == "local" else travelling(environ, named),
        port=options.port,
        scratch=Path(tempfile.gettempdir()) / f"megalite-launch-{os.getpid()}",
        interface=options.interface,
        address=options.master,
        extra=extra,
        devices=environ.get("CUDA_VISIBLE_DEVICES", ""),
    )
    plan = _Plan(loaded, available, hosts, idle, backend, programs, job)
    BACKENDS[backend](job, programs)  # raises LaunchError where the backend cannot start this job
    return plan


def _own_restarts(options: argparse.Namespace, backend: str, used: int = 0) -> list[str]:
    """Return the flag by which `megalite train` starts its own ranks again, which imports nothing anew.

    used: the restarts of `megalite train` itself so far, which count too.
    """
    # A rank of another launcher, of which there is one here, starts none.
    forks = backend == "local" and rank_info() is None
    return [f"--launch.restarts={options.restarts - used}"] if forks and options.restarts else []


def _plan_lines(plan: _Plan) -> Iterator[str]:
    for note in plan.loaded.notes:
        yield f"note: {note}"
    layout = plan.loaded.config.layout
    hosts = f"{len(plan.hosts)} host{'s' * (len(plan.hosts) != 1)} of {plan.available.named}"
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size != 1)}"
    yield (
        f"{ranks}: {layout.text}, on {plan.available.named if plan.job.local else hosts}, with --backend {plan.backend}"
    )
    width = max(len(host.name) for host in plan.hosts)
    for host in plan.hosts[:_RANKS_SHOWN]:
        slots = f" in slots {', '.join(map(str, host.slots))}" if host.chosen else ""
        yield f"  {host.name:<{width}}  {counted_ranks(list(host.ranks))}{slots}"
    if len(plan.hosts) > _RANKS_SHOWN:
        yield f"  and {len(plan.hosts) - _RANKS_SHOWN} more"
    if plan.idle:
        yield f"idle: {', '.join(plan.idle)}"
    hosts_of_ranks = [host.name for host in plan.hosts for _ in host.slots]
    if warning := placement_warning(layout, hosts_of_ranks, exchange_of_a_token(plan.loaded.config)):
        yield f"warning: {warning}"
    names = ", ".join(plan.job.exported) or "none"
    if plan.backend == "local":
        yield f"variables set for the ranks, besides those of this shell: {names}"
    else:
        yield f"variables that travel to the ranks: {names}"


def _dry_lines(plan: _Plan) -> Iterator[str]:
    """Yield the variables and the commands; secrets are hidden in both."""
    exported = shown(plan.job.exported)
    for name, value in exported.items():
        yield f"  {name}={shlex.quote(value)}"
    yield ""
    yield from shell_lines(BACKENDS[plan.backend](replace(plan.job, exported=exported), plan.programs))


def _check_hosts(plan: _Plan, options: argparse.Namespace) -> None:
    """Print the preflight. Raises LaunchError if a host cannot run its ranks."""
    result = _ask(plan, options, {host.name: len(host.slots) for host in plan.hosts})
    for line in result.lines():
        print(line, flush=True)
    result.require()


def _ask(plan: _Plan, options: argparse.Namespace, slots: Mapping[str, int]) -> Preflight:
    config = plan.loaded.config
    required = HostRequirements(
        plan.job.folder,
        plan.job.python,
        options.run_file,
        Path(config.run.folder),
        without_secrets(plan.job.exported),
        launch_interface=config.launch.interface,
        rank_bytes=least_memory(config).rank,
    )
    transport = transport_to(plan.available, ssh_options(plan.backend, variables(), plan.job.extra))
    return preflight(slots, required, transport, options.preflight_seconds)


def _plan_again(
    plan: _Plan, options: argparse.Namespace, overrides: Sequence[str], number: int, kept: bool
) -> _Plan:
    """Return the plan of restart `number`: the hosts that are left, their layout, and the checkpoint to resume from.

    kept: whether it can go on from what the run has kept, which checkpoint.resume may pass over. Raises LaunchError if
    the hosts that are left cannot run the job.
    """
    config, flags = plan.loaded.config, []
    if config.checkpoint.resume != "auto" and kept:
        flags = ["--checkpoint.resume", "auto"]
    available, ranks = plan.available, config.layout.world_size
    if options.preflight:
        restart = remaining_hosts(
            available,
            ranks,
            lambda asked: _shown(_ask(plan, options, {host.name: len(host.slots) for host in asked.hosts})),
            partial(smaller_layout, options.run_file, overrides, ranks) if options.allow_fewer else None,
            _say,
        )
        available, ranks, flags = restart.hosts, restart.ranks, [*flags, *restart.flags]
    hosts, idle = place_ranks(available, ranks)
    own = _own_restarts(options, plan.backend, number)
    job = replace(plan.job, hosts=hosts, arguments=(*plan.job.arguments, *flags, *own))
    return replace(
        plan, loaded=load_run(options.run_file, [*overrides, *flags], ranks), hosts=hosts, idle=idle, job=job
    )


def _shown(result: Preflight) -> Preflight:
    """Print the preflight of a restart if a host did not pass."""
    if len(result.passed) < len(result.reports):
        for line in result.lines():
            print(line, flush=True)
    return result


def _attempt(plan: _Plan, environ: Mapping[str, str]) -> Result:
    """Start the job with a coordinator of its own, and return how it ended."""
    job, coordinator = plan.job, None
    if plan.backend != "local":
        listener = listen([] if job.local else [host.name for host in job.hosts])
        nonce = secrets.token_hex(16)
        config, hosts = plan.loaded.config, [host.name for host in job.hosts for _ in host.ranks]
        coordinator = Coordinator(
            listener,
            CoordinatedJob(job.world_size, nonce=nonce, layout=config.layout, hosts=hosts),
            config.rendezvous_limits,
            say=_say,
        )
        address, port = coordinator.address
        meeting = {"MEGALITE_COORDINATOR": f"{address}:{port}/{nonce}"}
        job = replace(job, exported={**job.exported, **meeting})
    with starter_folder() as scratch:
        start = BACKENDS[plan.backend](replace(job, scratch=scratch), plan.programs)
        return supervise(start, coordinator, backend=plan.backend, environ=environ, say=_say)


def _say(line: str) -> None:
    print(line, flush=True)
