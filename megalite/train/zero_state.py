"""ZeRO's optimizer state for the checkpoint: runs of flattened shards, as they lie in DeepSpeed's partitions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.topology.state import MASTER, WEIGHT, OptimizerState, StateShard
from megalite.train.deepspeed_ops import replay_steps
from megalite.train.loss_scale import LossScale
from megalite.train.optimizer import ensure_state, set_step_count, step_count


def zero_state(
    zero: Any,
    parameters: Sequence[Parameter],
    tensors: Mapping[str, nn.Parameter],
    mesh: ParallelMesh,
    scale: LossScale | None,
) -> OptimizerState:
    """The state of the optimizer that DeepSpeed made for these parameters."""
    sharded = hasattr(zero, "fp32_partitioned_groups_flat")
    return (_ShardedState if sharded else _PartitionedState)(zero, parameters, tensors, mesh, scale)


@dataclass(frozen=True)
class _Run:
    """A run of one parameter: `start` in its flattened shard, `offset` in the flat partition `flat` of its group."""

    parameter: Parameter
    start: int
    size: int
    flat: Tensor
    offset: int

    def of(self, values: Tensor) -> Tensor:
        """The run's elements of a tensor that lies as the partition does."""
        return values.detach().view(-1).narrow(0, self.offset, self.size)


class _ZeroState(ABC):
    """What all stages have in common: where the runs of this rank lie is the stage's to say."""

    def __init__(
        self,
        zero: Any,
        parameters: Sequence[Parameter],
        tensors: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        scale: LossScale | None,
    ):
        self._zero, self._parameters, self._tensors = zero, parameters, tensors
        self._dp_rank, self._scale = mesh.dp.rank, scale
        self._narrow = any(tensor.element_size() < 4 for tensor in tensors.values())

    @abstractmethod
    def _runs(self) -> Iterator[_Run]:
        """Those of this rank's partitions."""

    @contextmanager
    def _updatable(self) -> Iterator[torch.optim.Optimizer]:
        """The torch optimizer, with the partitions as the parameters of its groups."""
        yield self._zero.optimizer

    def weights(self) -> Iterable[StateShard] | None:
        return None

    def shards(self) -> Iterator[StateShard]:
        with self._updatable() as optimizer:
            ensure_state(optimizer)
        for run in self._runs():
            held = {key: values for key, values in optimizer.state[run.flat].items() if key != "step"}
            if self._narrow:
                held[MASTER] = run.flat
            for key, values in held.items():
                yield StateShard(run.parameter, key, run.start, run.of(values))

    def scalars(self) -> dict[str, Any]:
        scale = {} if self._scale is None else self._scale.scalars()
        return {"step": step_count(self._zero.optimizer), **scale}

    def load(self, scalars: Mapping[str, Any]) -> None:
        with self._updatable() as optimizer:
            ensure_state(optimizer)
        set_step_count(optimizer, float(scalars["step"]))
        replay_steps(optimizer, int(scalars["step"]))
        if self._scale is not None:
            self._scale.load(scalars)
        if not self._narrow:
            # Nobody stored these masters: they follow the weights, which the checkpoint has just filled.
            self._zero.refresh_fp32_params()


class _PartitionedState(_ZeroState):
    """ZeRO 1 and 2: this rank's partition of each group, cut where parameters begin and end."""

    def _runs(self) -> Iterator[_Run]:
        for parameter in self._parameters:
            fragment = self._tensors[parameter.name]._hp_mapping  # type: ignore[attr-defined]
            if fragment is not None:
                flat = self._zero.single_partition_of_fp32_groups[fragment.param_group_index]
                place = fragment.hp_fragment_address
                yield _Run(parameter, fragment.lp_fragment_address.start, place.numel, flat, place.start)


class _ShardedState(_ZeroState):
    """ZeRO 3: this rank's partition of each parameter, which may end in padding, or be nothing else."""

    def _runs(self) -> Iterator[_Run]:
        for parameter in self._parameters:
            tensor: Any = self._tensors[parameter.name]
            group, offset, length = self._zero.grad_position[self._zero.get_param_id(tensor)]
            start = self._dp_rank * length
            size = min(length, tensor.ds_numel - start)
            if size > 0:
                flat = self._zero.fp32_partitioned_groups_flat[group]
                yield _Run(parameter, start, size, flat, offset)

    @contextmanager
    def _updatable(self) -> Iterator[torch.optim.Optimizer]:
        # DeepSpeed leaves the groups empty but for the one that it updates.
        groups = self._zero.optimizer.param_groups
        for place, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            groups[self._zero.sub_group_to_group_id[place]]["params"].append(flat)
        try:
            yield self._zero.optimizer
        finally:
            for group in groups:
                group["params"] = []

    def weights(self) -> Iterable[StateShard]:
        for run in self._runs():
            partition = self._tensors[run.parameter.name].ds_tensor  # type: ignore[attr-defined]
            values = partition.detach().view(-1).narrow(0, 0, run.size)
            yield StateShard(run.parameter, WEIGHT, run.start, values)

    def load(self, scalars: Mapping[str, Any]) -> None:
        super().load(scalars)
        # Parameters that stay gathered between steps still have the values of before.
        self._zero._partition_all_parameters()
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)
