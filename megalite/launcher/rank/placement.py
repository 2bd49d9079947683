"""Places ranks on cores, by NUMA node, and says which ranks that exchange much are on different hosts."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import Literal

from megalite.errors import listed
from megalite.launcher.process import available_cores
from megalite.launcher.rank.detect import RankInfo
from megalite.topology.axes import AXES, Layout

_SYSTEM, _GPUS = Path("/sys/devices/system"), Path("/proc/driver/nvidia/gpus")


def bind_cores(
    info: RankInfo,
    environ: Mapping[str, str],
    bind: bool | Literal["auto"] = "auto",
    system: Path = _SYSTEM,
    gpus: Path = _GPUS,
) -> tuple[int, ...]:
    """Bind this process, and the threads that it starts from now on, to its rank's cores; return them, or nothing.

    "auto" binds on machines with several NUMA nodes or with GPUs: elsewhere all cores are as near, and the kernel
    places threads better. Nothing is bound if a launcher has bound the ranks, if they outnumber the cores, or if
    the cores cannot be known.
    """
    allowed = sorted(os.sched_getaffinity(0))
    bound = len(allowed) < (os.cpu_count() or 1) or available_cores() < len(allowed)
    if bind is False or bound or info.local_world_size > len(allowed):
        return ()
    nodes = numa_nodes(system)
    near = nodes_of_gpus(gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    if not nodes or (bind == "auto" and len(nodes) == 1 and not near):
        return ()
    cores = cores_of_rank(info.local_rank, info.local_world_size, nodes, near)
    if cores:
        os.sched_setaffinity(0, cores)
    return cores


def cores_of_rank(
    local_rank: int, ranks: int, nodes: Mapping[int, Sequence[int]], near: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the cores of one of a host's ranks: disjoint from the others', on one NUMA node or on whole nodes.

    nodes: NUMA node -> its cores. near: the NUMA node of each rank's GPU, empty without GPUs. Returns nothing where
    a rank would have no core of its own.
    """
    numbers = sorted(nodes)
    if len(near) >= ranks and set(near[:ranks]) <= set(numbers):
        homes = list(near[:ranks])
    elif ranks < len(numbers):
        own = numbers[local_rank * len(numbers) // ranks : (local_rank + 1) * len(numbers) // ranks]
        return tuple(core for number in own for core in nodes[number])
    else:
        homes = [numbers[rank * len(numbers) // ranks] for rank in range(ranks)]
    if any(count > len(nodes[home]) for home, count in Counter(homes).items()):
        return ()
    home = homes[local_rank]
    sharing, place, cores = homes.count(home), homes[:local_rank].count(home), nodes[home]
    return tuple(cores[place * len(cores) // sharing : (place + 1) * len(cores) // sharing])


def numa_nodes(system: Path = _SYSTEM) -> dict[int, list[int]]:
    """Return NUMA node -> its cores, hardware threads of a core side by side; empty if the kernel does not say."""
    nodes = {}
    for folder in (system / "node").glob("node[0-9]*"):
        try:
            cores = _numbers((folder / "cpulist").read_text())
            # The first of a core's hardware threads, then the thread itself.
            order = sorted(((_siblings(system / "cpu" / f"cpu{core}") or [core])[0], core) for core in cores)
        except (OSError, ValueError):
            return {}
        if order:
            nodes[int(folder.name.removeprefix("node"))] = [core for _, core in order]
    return nodes


def nodes_of_gpus(gpus: Path = _GPUS, visible: str | None = None) -> list[int]:
    """Return the NUMA node of each visible GPU in CUDA's order; empty if there is none, or any is unknown."""
    devices = Path("/sys/bus/pci/devices")
    try:
        nodes = [int((devices / each.name / "numa_node").read_text()) for each in sorted(gpus.iterdir())]
    except (OSError, ValueError):
        return []
    if visible is not None:
        chosen = [each.strip() for each in visible.split(",")]
        if not all(each.isdecimal() and int(each) < len(nodes) for each in chosen):
            return []
        nodes = [nodes[int(each)] for each in chosen]
    return nodes if min(nodes, default=-1) >= 0 else []


def _siblings(core: Path) -> list[int]:
    try:
        return _numbers((core / "topology" / "thread_siblings_list").read_text())
    except OSError:
        return []


def _numbers(ranges: str) -> list[int]:
    """Expand the kernel's "0-3,8" to 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for item in filter(None, ranges.strip().split(",")):
        first, _, last = item.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def groups_across_hosts(layout: Layout, axis: str, hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the groups along an axis, "ep" among them, whose ranks are not all on one host.

    hosts: the host of each rank.
    """
    return [group for group in _groups(layout, axis) if len({hosts[rank] for rank in group}) > 1]


def _groups(layout: Layout, axis: str) -> Sequence[tuple[int, ...]]:
    if axis != "ep":
        return layout.groups(axis)
    return tuple(dict.fromkeys(layout.expert_peers(rank)["ep"] for rank in range(layout.world_size)))


def placement_warning(layout: Layout, hosts: Sequence[str], exchanged: str = "") -> str:
    """Return a warning, with its remedy, if ranks that exchange tensors in every layer are on different hosts.

    Those are tensor-parallel ranks, and context- and expert-parallel ones where a host has room for all that share a
    sequence, or the experts of a layer. exchanged: what experts exchange, in words. Empty if all are together.
    """
    if groups_across_hosts(layout, "tp", hosts):
        return _warning(layout, "tp", layout.tensor, hosts)
    room, experts = max(Counter(hosts).values()), layout.expert * layout.expert_sizes["etp"]
    for axis, size, together in (
        ("cp", layout.context, layout.tensor * layout.context),
        ("ep", layout.expert, experts),
    ):
        if size > 1 and together <= room and groups_across_hosts(layout, axis, hosts):
            return _warning(layout, axis, together, hosts, exchanged if axis == "ep" else "")
    return ""


def _warning(layout: Layout, axis: str, together: int, hosts: Sequence[str], exchanged: str = "") -> str:
    """Describe the groups along `axis` that span hosts. together: the consecutive ranks that belong on one host."""
    apart, name = groups_across_hosts(layout, axis, hosts), AXES.get(axis, "expert")
    places = listed([f"{rank} on {hosts[rank]}" for rank in apart[0]], 4)
    count = f"{len(apart)} of {len(_groups(layout, axis))} {name}-parallel groups"
    amount = f" ({exchanged})" if exchanged else ""
    text = f"{count} span hosts (ranks {places}), so that every layer waits for the network{amount}; "
    names = list(dict.fromkeys(hosts))
    in_order = [name for name in names for host in hosts if host == name]
    if not groups_across_hosts(layout, axis, in_order):
        runs = sum(1 for _ in groupby(hosts))
        assert runs > len(names)
        return text + (
            "give neighbouring ranks to the same host (Open MPI: --map-by slot, srun: --distribution=block, MPICH: "
            "HOST:SLOTS lines in the host file)"
        )
    inner = together // {**layout.sizes, "ep": layout.expert}[axis]
    fitting = gcd(together, *Counter(hosts).values()) // inner
    smaller = f"use parallel.{name} = {fitting}, or " if fitting > 1 else ""
    return f"{text}{smaller}start a multiple of {together} ranks on each host"
