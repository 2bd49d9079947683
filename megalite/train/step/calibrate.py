"""Measures this machine: starts groups of its ranks, has each time the parts of a step, and gathers the times."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megalite.config.sections.schema import RunConfig
from megalite.errors import LaunchError
from megalite.launcher.local import LocalStart, run_local_ranks
from megalite.launcher.process import available_cores, total_memory_bytes
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.environment import bind_rank
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh, connect, disconnect
from megalite.planner.calibration import Calibration, MeasuredLinks, MeasuredRanks, calibration_of
from megalite.selftest.decide import KernelChoice, known_kernels
from megalite.selftest.trust import card_name
from megalite.topology.axes import Layout
from megalite.topology.optimizers import OPTIMIZERS
from megalite.train.step.calibration_probes import ON_CARDS, ON_CPU, Probes
from megalite.train.step.part_times import PartTimes, RankClock, link_times
from megalite.train.step.precision import DTYPES, set_tf32

_MOST_RANKS = 8
"""Ranks that compute at once: those of a machine with more cores have as many threads more."""


@dataclass(frozen=True)
class CalibrationJob:
    """The work of each rank of a group. computes: whether it times computations, or links alone.

    probes: None: those of its device.
    """

    configs: Sequence[RunConfig]
    vocabulary: int
    threads: int
    computes: bool
    answer: Path
    probes: Probes | None = None


@dataclass(frozen=True)
class MeasuredMachine:
    """device: "cpu" or the card's name. units: its cards, or its cores. groups: ranks -> whether they compute."""

    cards: bool
    device: str
    units: int
    memory: int
    groups: dict[int, bool]


def calibrate(
    configs: Sequence[RunConfig], vocabulary: int, machine_name: str, probes: Probes | None = None
) -> Calibration:
    """Measure this machine, in one to two minutes. configs: the run in each precision to measure, for its operators.

    Call it in a process that has computed nothing with torch; `prepare_process` was called before torch's import.
    """
    machine = this_machine()
    computing: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    kernels = ""
    for ranks, computes in machine.groups.items():
        threads = max(1, available_cores() // ranks)
        with tempfile.TemporaryDirectory(prefix="megalite-calibration-") as folder:
            answer = Path(folder) / "answer.json"
            job = CalibrationJob(configs, vocabulary, threads, computes, answer, probes)
            code = run_local_ranks(
                calibrate_rank,
                Layout(data=ranks),
                Path(folder) / "failures",
                arguments=(job,),
                start=LocalStart(
                    ["torch", "megalite.train.step.part_times"],
                    # A forked process cannot use a card that its parent has asked about.
                    "spawn" if machine.cards else "fork",
                ),
            )
            if code:
                raise LaunchError(f"the calibration was ended with code {code}")
            answered = json.loads(answer.read_text(encoding="utf-8"))
        computing += answered["computing"]
        links += answered["links"]
        kernels = answered["kernels"] or kernels
    return calibration_of(
        {
            "machine": machine_name,
            "device": machine.device,
            "units": machine.units,
            "memory": machine.memory,
            "torch": torch.__version__,
            "kernels": kernels,
            "computing": computing,
            "links": links,
        }
    )


def this_machine() -> MeasuredMachine:
    """Return this machine as ranks would use it, and the groups to measure: the last one runs in this process."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        cores = available_cores()
        # A power of two, so that groups of two and of all of them share the models.
        together = 2 ** (min(cores, _MOST_RANKS).bit_length() - 1)
        groups = {2 * together: together == 1, together: True, 1: True}
        return MeasuredMachine(False, "cpu", cores, total_memory_bytes() or 0, groups)
    cards = torch.accelerator.device_count()
    card = torch.device(accelerator.type, 0)
    sizes = [2**power for power in range(_MOST_RANKS.bit_length() - 1, 0, -1) if 2**power <= cards]
    groups = {**dict.fromkeys(sizes, False), 1: True}
    memory = torch.get_device_module(card).get_device_properties(card).total_memory
    return MeasuredMachine(True, card_name(card), cards, memory, groups)


def calibrate_rank(info: RankInfo, job: CalibrationJob) -> int:
    """Measure as one rank of a group; rank 0 writes the times to the job's answer."""
    bind_rank(info, "auto")
    torch.set_num_threads(job.threads)
    device = local_device(info.local_rank, info.local_world_size)
    connect(info.rank, info.world_size, device=device, rendezvous=info.rendezvous)
    content = group_times(job, info.world_size, device)
    disconnect()
    if info.rank == 0:
        job.answer.write_text(json.dumps(content), encoding="utf-8")
    return 0


def group_times(job: CalibrationJob, ranks: int, device: torch.device) -> dict[str, Any]:
    """Return the times of a group as JSON has them; called on each of its ranks, in their process group."""
    probes = job.probes or (ON_CPU if device.type == "cpu" else ON_CARDS)
    chosen: dict[str, KernelChoice] = {}
    for config in job.configs:
        precision = config.training.precision
        chosen[precision] = known_kernels(config, config.shape(job.vocabulary), DTYPES[precision], device)
        set_tf32(device, config.training.tf32)
    clock = RankClock(ParallelMesh.over_world(Layout(data=ranks), device), probes.rounds)
    groups = {ranks, 2} if ranks > 1 else ()
    meshes = [ParallelMesh.over_world(Layout(tensor=group, data=ranks // group), device) for group in groups]
    rounds = [
        {
            "computing": [
                asdict(_computing(clock, job.threads, precision, kernels, probes))
                for precision, kernels in (chosen.items() if job.computes else ())
            ],
            "links": [asdict(_links(RankClock(mesh, probes.rounds), probes, chosen)) for mesh in meshes],
        }
        for _ in range(probes.rounds)
    ]
    clock.mesh.barrier()
    return {**least_times(rounds), "kernels": ", ".join(dict.fromkeys(map(str, chosen.values())))}


def least_times(rounds: Sequence[Any]) -> Any:
    """Return the rounds' content with the least of each time, and the median of `alone`, a ratio of two."""
    first = rounds[0]
    if isinstance(first, dict):
        least = {key: least_times([content[key] for content in rounds]) for key in first}
        return least | {key: median(content[key] for content in rounds) for key in first if key == "alone"}
    if isinstance(first, list | tuple):
        return [least_times(contents) for contents in zip(*rounds, strict=True)]
    return min(rounds) if isinstance(first, float) else first


def _computing(
    clock: RankClock, threads: int, precision: str, kernels: KernelChoice, probes: Probes
) -> MeasuredRanks:
    parts, ranks = PartTimes(clock, precision, kernels), clock.mesh.layout.world_size
    models = [*probes.models, *probes.variants]
    single = [replace(model, layers=1) for model in models]
    zeros = (0, 1, 2, 3) if find_spec("deepspeed") and ranks > 1 else (0,)
    return MeasuredRanks(
        ranks,
        threads,
        precision,
        parts.alone(probes.models[1]) if ranks > 1 else 1.0,
        [parts.product(*sizes) for sizes in probes.products],
        [parts.attention(*sizes) for sizes in probes.attention],
        [parts.model(model) for pair in zip(single, models, strict=True) for model in pair],
        [
            parts.update(model, name)
            for name in OPTIMIZERS
            for model in (probes.updated if name != "muon" else probes.updated_slowly)
        ],
        [
            parts.whole_step(model, micro_batches, zero)
            for zero in zeros
            for model in probes.steps
            for micro_batches in (1, probes.micro_batches)
        ],
    )


def _links(clock: RankClock, probes: Probes, chosen: Mapping[str, KernelChoice]) -> MeasuredLinks:
    """Measure the links in the groups of the mesh's tensor axis, while all ranks are in such groups."""
    tiny, *_, large = probes.models
    layout = clock.mesh.layout
    # A group of more ranks than heads could not share a model.
    wide = [replace(model, heads=max(model.heads, layout.tensor)) for model in (tiny, large)]
    shared = [replace(model, layers=layers) for model in wide for layers in (1, model.layers)]
    models = {
        precision: [PartTimes(clock, precision, kernels, shared=True).model(model) for model in shared]
        for precision, kernels in chosen.items()
    }
    return MeasuredLinks(layout.world_size, layout.tensor, list(link_times(clock, probes.links)), models)
