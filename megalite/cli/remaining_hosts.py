"""The hosts and the layout of a restart: spare hosts take over, and --allow-fewer goes on in a smaller layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.config.smaller_layout import smaller_layout
from megalite.launcher.hosts.job_hosts import Hosts
from megalite.launcher.hosts.preflight import Preflight


@dataclass(frozen=True)
class Restart:
    """Where a job goes on: its hosts, its number of ranks, and the flags of its layout behind those of the user."""

    hosts: Hosts
    ranks: int
    flags: tuple[str, ...] = ()


def remaining_hosts(
    run_file: Path,
    overrides: Sequence[str],
    ranks: int,
    found: Hosts,
    ask: Callable[[Hosts], Preflight],
    *,
    allow_fewer: bool,
    say: Callable[[str], None],
) -> Restart:
    """Return the hosts that still pass the preflight, and the layout that fits them.

    ranks: those of the whole job; overrides: its flags. ask: the preflight of some hosts. Raises LaunchError where the
    hosts that passed have too few slots: without allow_fewer for the layout, with it for any legal one.
    """
    result = ask(found)
    left = replace(found, hosts=tuple(host for host in found.hosts if host.name in result.passed))
    gone = [host.name for host in found.hosts if host not in left.hosts]
    if not gone:
        return Restart(found, ranks)
    slots = sum(len(host.slots) for host in left.hosts)
    if not slots or (slots < ranks and not allow_fewer):
        result.require()
    # Hosts are compared with the first, which may have been the one that is gone.
    ask(left).require()
    if slots >= ranks:
        say(f"{', '.join(gone)} left out: the other hosts have {slots} slots for {ranks} ranks")
        return Restart(left, ranks)
    run = smaller_layout(run_file, overrides, ranks, slots)
    layout, training = run.loaded.config.layout, run.loaded.config.training
    say(
        f"{', '.join(gone)} left out: going on with {layout.world_size} of {ranks} ranks, {layout.text}, "
        f"{training.micro_batches} micro batches of {training.micro_batch_size}, "
        f"the same global batch of {training.global_batch_size}"
    )
    return Restart(left, layout.world_size, run.flags)
