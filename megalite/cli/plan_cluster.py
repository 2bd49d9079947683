"""The cluster that `megalite plan` is not told: of a hostfile, of the SLURM allocation, or this machine's cards."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from megalite.errors import ConfigError, Problem
from megalite.launcher.hosts.job_hosts import HostOptions, find_hosts
from megalite.launcher.machine_report import NVIDIA_CARDS, nvidia_cards

_CARDS_PER_NODE = 8


def take_cluster(options: argparse.Namespace, environ: Mapping[str, str], cards: Path = NVIDIA_CARDS) -> None:
    """Fill in nodes, cards per node and the card as far as they can be known; options that are set stay.

    cards: the driver's folder of this machine's cards. Raises ConfigError for hosts with unequal numbers of slots and
    for options that contradict the hostfile, LaunchError for a hostfile that cannot be read.
    """
    here = nvidia_cards(cards) if options.card is None else ()
    if len(set(here)) == 1:
        options.card = here[0]
    if options.hostfile is not None and options.nodes is not None:
        raise ConfigError(
            [Problem("--nodes", "has no effect with --hostfile, whose hosts are the nodes", "leave it out")]
        )
    allocated = "SLURM_JOB_ID" in environ and "SLURM_JOB_NODELIST" in environ
    if options.hostfile is not None or allocated:
        hosts = find_hosts(HostOptions(hostfile=options.hostfile), environ)
        slots = {host.name: len(host.slots) for host in hosts.hosts}
        options.nodes = options.nodes or len(slots)
        options.cards_per_node = options.cards_per_node or _equal(slots, hosts.named)
        if options.hostfile is not None and options.cards_per_node > (least := min(slots.values())):
            message = f"{options.cards_per_node} is more than the {least} slots of a host of {hosts.named}"
            raise ConfigError([Problem("--cards-per-node", message, f"use at most {least}")])
    options.nodes = options.nodes or 1
    options.cards_per_node = options.cards_per_node or len(here) or _CARDS_PER_NODE


def _equal(slots: Mapping[str, int], named: str) -> int:
    """Return the number of slots of every host."""
    first, *others = slots
    for host in others:
        if slots[host] != slots[first]:
            unequal = f"{slots[first]} slots on {first} and {slots[host]} on {host}"
            remedy = f"use --cards-per-node {min(slots.values())}, or leave the smaller hosts out"
            message = f"{named} has {unequal}, and a plan is for equal nodes"
            raise ConfigError([Problem("--cards-per-node", message, remedy)])
    return slots[first]
