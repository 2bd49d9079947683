"""The operators of a run, chosen alike on all ranks: after a test of the cards, where they need one."""

import torch

from megalite.config.sections.schema import RunConfig
from megalite.model.kernels import KernelChoice, choose_kernels
from megalite.ops import trust
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.train.precision import DTYPES


def known_kernels(config: RunConfig, shape: ModelShape, device: torch.device) -> KernelChoice:
    """Return the operators of model.kernels on this device, by earlier self-tests. Raises ConfigError."""
    asked = config.model.kernels
    if asked == "reference" or not trust.needs_proof(device.type):
        return choose_kernels(asked, device.type)
    from megalite.selftest.decide import known_choices, workload_of

    workload = workload_of(config, shape, DTYPES[config.training.precision])
    return choose_kernels(asked, device.type, known_choices(workload, device))


def agreed_kernels(
    config: RunConfig, shape: ModelShape, mesh: ParallelMesh, *, leads_node: bool
) -> tuple[KernelChoice, str]:
    """Return the operators of model.kernels, the same on all ranks, and a line about the self-test; collective.

    The ranks that lead a node test what was not tested on its cards, while the others wait. An operator that one
    machine does not trust is used on none. Raises ConfigError, on every rank, as `choose_kernels` does.
    """
    asked, device = config.model.kernels, mesh.device
    if asked == "reference" or not trust.needs_proof(device.type):
        return choose_kernels(asked, device.type), ""
    from megalite.selftest.decide import combined, proved_choices, workload_of

    choices, note = None, ""
    if leads_node:
        workload = workload_of(config, shape, DTYPES[config.training.precision])
        choices, note = proved_choices(workload, device)
    gathered = mesh.gather_objects((trust.machine(device), choices))
    together = mesh.broadcast_object(combined(gathered) if gathered is not None else None)
    return choose_kernels(asked, device.type, together), note
