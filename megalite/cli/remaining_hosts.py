"""The hosts and the layout of a restart: spare hosts take over, and --allow-fewer goes on in a smaller layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megalite.config.smaller_layout import SmallerRun
from megalite.launcher.hosts.job_hosts import Hosts
from megalite.launcher.hosts.preflight import Preflight


@dataclass(frozen=True)
class Restart:
    """Where a job goes on: its hosts, its number of ranks, and the flags of its layout behind those of the user."""

    hosts: Hosts
    ranks: int
    flags: tuple[str, ...] = ()


def remaining_hosts(
    hosts: Hosts,
    ranks: int,
    ask: Callable[[Hosts], Preflight],
    shrink: Callable[[int], SmallerRun] | None,
    say: Callable[[str], None],
) -> Restart:
    """Return the hosts that still pass the preflight, and the layout that fits them.

    ranks: those of the whole job. ask: the preflight of some hosts. shrink: the run in a number of slots; None: it must
    not shrink. Raises LaunchError where the hosts that passed have too few slots: without `shrink` for the layout, with
    it for any legal one.
    """
    result = ask(hosts)
    left = replace(hosts, hosts=tuple(host for host in hosts.hosts if host.name in result.passed))
    gone = [host.name for host in hosts.hosts if host not in left.hosts]
    if not gone:
        return Restart(hosts, ranks)
    slots = sum(len(host.slots) for host in left.hosts)
    if not slots or (slots < ranks and shrink is None):
        result.require()
    # Hosts are compared with the first, which may have been the one that is gone.
    ask(left).require()
    if slots >= ranks or shrink is None:
        say(f"{', '.join(gone)} left out: the other hosts have {slots} slots for {ranks} ranks")
        return Restart(left, ranks)
    run = shrink(slots)
    layout, batch = run.loaded.config.layout, run.loaded.config.batch
    chosen = run.loaded.config.training.micro_batch_size == "auto"
    made = (
        "micro batches by memory"
        if chosen
        else f"{batch.micro_batches} micro batches of {batch.micro_batch_size}"
    )
    say(
        f"{', '.join(gone)} left out: going on with {layout.world_size} of {ranks} ranks, {layout.text}, "
        f"{made}, the same global batch of {batch.global_batch_size}"
    )
    return Restart(left, layout.world_size, run.flags)
