"""Experts under DeepSpeed's ZeRO, which partitions them over fewer ranks than dense weights: their marks and groups.

DeepSpeed knows experts by its own layer of them or, at stage 3, by its own rewriting of models; ours are neither.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.partition_parameters import register_external_parameter
from deepspeed.utils import groups
from torch import nn

from megalite.model.replica import Replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import EXPERT_AXIS
from megalite.topology.parameters import Parameter

GROUP = "experts"
"""DeepSpeed's name of the process groups of experts."""


class _ExpertMarker(MoE):
    """The layer by which DeepSpeed's stages 1 and 2 learn that there are experts; it has no parameters."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 1

    def set_deepspeed_parallelism(self, *_: Any) -> None:
        """The groups are there."""


def partitioned_apart(parameters: Sequence[Parameter], mesh: ParallelMesh) -> tuple[Parameter, ...]:
    """Return the parameters that other ranks hold than those with the same dense weights: experts, in most layouts."""
    return tuple(each for each in parameters if mesh.copies(each).ranks != mesh.dense_gradients.ranks)


@contextmanager
def experts_marked(replica: Replica, optimizer: torch.optim.Optimizer, stage: int) -> Iterator[None]:
    """Have DeepSpeed, which starts within, find the experts, their process groups and their groups of the optimizer.

    stage: of the optimizer that DeepSpeed is asked for.
    """
    if stage == 3:
        _gather_around_mixtures(replica)
    # Frozen ones too: DeepSpeed copies the weights of a group's first rank to all of it as it starts.
    mesh, experts = replica.mesh, partitioned_apart(replica.parameters, replica.mesh)
    if not experts:
        yield
        return
    ranks = mesh.copies(experts[0])
    groups._EXPERT_PARALLEL_GROUP[GROUP] = mesh.ep.group
    groups._EXPERT_PARALLEL_GROUP_RANKS[GROUP] = list(mesh.ep.ranks)
    groups._EXPERT_DATA_PARALLEL_GROUP[GROUP] = ranks.group
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[GROUP] = list(ranks.ranks)
    tensors: list[Any] = [replica.tensors[each.name] for each in experts]
    for parameter, tensor in zip(experts, tensors, strict=True):
        # The norm counts its partitions on every rank of a replica, but once what ranks of tp have in common.
        tensor.allreduce, tensor.group_name = False, GROUP
        tensor.tensor_model_parallel = parameter.spec.dim is not None or not mesh.cuts_experts
        if stage == 3:
            tensor.ds_zero_placement_family = "autoep_expert"
            tensor.ds_zero_partition_group_name = GROUP
            tensor.ds_zero_partition_process_group = ranks.group
    _split_groups(optimizer, tensors)
    if stage == 3 or not any(each.trained for each in experts):
        yield
        return
    replica.stage.add_module("deepspeed_experts", _ExpertMarker())
    try:
        yield
    finally:
        del replica.stage.deepspeed_experts


@contextmanager
def exact_biases(replica: Replica) -> Iterator[None]:
    """Leave the biases that counts move in their own type; DeepSpeed rounds every parameter to the type of the run."""
    exact = {each.name: replica.tensors[each.name].detach().clone() for each in replica.counted}
    yield
    for name, values in exact.items():
        replica.tensors[name].data = values


def count_cut_experts(zero: Any, mesh: ParallelMesh) -> None:
    """Have the norm of ZeRO 3 add what each rank of tp holds of an expert, which to DeepSpeed is whole on a rank."""
    if mesh.cuts_experts:
        zero._grad_norm_counts_every_rank = lambda parameters, ranks: False


def reduce_in_float32(zero: Any) -> None:
    """Have ZeRO 2 copy gradients in float32 into its buckets, which have the type of the weights otherwise.

    Dense weights alone need no bucket (`_handed`); with experts DeepSpeed has sums over two groups only there.
    """
    zero._gradient_reduction_buffer_dtype = lambda: torch.float32


def _gather_around_mixtures(replica: Replica) -> None:
    """Have ZeRO 3 gather experts where their mixture runs: the modules that hold their weights never do."""
    for parameter in replica.parameters:
        if parameter.spec.axis == EXPERT_AXIS:
            mixture = replica.stage.get_submodule(parameter.name.partition(".experts.")[0])
            register_external_parameter(mixture, replica.tensors[parameter.name])


def _split_groups(optimizer: torch.optim.Optimizer, experts: Sequence[Any]) -> None:
    """Give experts groups of their own, as DeepSpeed wants them."""
    apart = {id(tensor) for tensor in experts}
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        dense = [each for each in group["params"] if id(each) not in apart]
        of_experts = [each for each in group["params"] if id(each) in apart]
        split += [{**group, "params": dense}] if dense else []
        split += [{**group, "params": of_experts, "moe": True, "name": GROUP}] if of_experts else []
    optimizer.param_groups[:] = split
