"""ZeRO's optimizer state for the checkpoint: flat ranges of shards, as they lie in DeepSpeed's partitions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from megalite.model.replica import Replica
from megalite.topology.state import MASTER, WEIGHT, StateShard
from megalite.train.optimizer.deepspeed_ops import replay_steps
from megalite.train.optimizer.flat_range import FlatRange, mapped, partition_of
from megalite.train.optimizer.loss_scale import LossScale
from megalite.train.optimizer.rule import ensure_state
from megalite.train.optimizer.update import set_step_count, step_count


def zero_state(zero: Any, replica: Replica, scale: LossScale | None) -> "ZeroState":
    """The state of `zero`, the optimizer that DeepSpeed made for the replica's parameters."""
    sharded = hasattr(zero, "fp32_partitioned_groups_flat")
    return (_ShardedState if sharded else _PartitionedState)(zero, replica, scale)


class ZeroState(ABC):
    """The common part of all ZeRO stages; a stage says where the flat ranges of this rank lie."""

    def __init__(self, zero: Any, replica: Replica, scale: LossScale | None):
        self._zero, self._parameters, self._tensors = zero, replica.trained, replica.trained_tensors
        self._mesh, self._scale = replica.mesh, scale
        self._low_precision = any(tensor.element_size() < 4 for tensor in self._tensors.values())

    @abstractmethod
    def ranges(self) -> Iterator[FlatRange]:
        """The flat ranges in this rank's partitions."""

    def _ensure_state(self) -> None:
        """Have the optimizer make its state of every partition."""
        ensure_state(self._zero.optimizer)

    def weights(self) -> Iterable[StateShard] | None:
        return None

    def shards(self) -> Iterator[StateShard]:
        self._ensure_state()
        for flat_range in self.ranges():
            for key, values in self._held(flat_range.group, flat_range.flat).items():
                if key != MASTER or self._low_precision:
                    yield StateShard(flat_range.parameter, key, flat_range.start, flat_range.of(values))

    def _held(self, group: int, flat: Tensor) -> dict[str, Tensor]:
        """A partition and what the optimizer has of it."""
        state = self._zero.optimizer.state[flat]
        return {MASTER: flat, **{key: values for key, values in state.items() if key != "step"}}

    def scalars(self) -> dict[str, Any]:
        scale = {} if self._scale is None else self._scale.scalars()
        return {"step": step_count(self._zero.optimizer), **scale}

    def load(self, scalars: Mapping[str, Any]) -> None:
        self._ensure_state()
        set_step_count(self._zero.optimizer, float(scalars["step"]))
        replay_steps(self._zero.optimizer, int(scalars["step"]))
        if self._scale is not None:
            self._scale.load(scalars)
        if not self._low_precision:
            # The checkpoint has no masters of a model in fp32: they are its weights, which were loaded just now.
            self._refresh_masters()

    def _refresh_masters(self) -> None:
        self._zero.refresh_fp32_params()


class _PartitionedState(ZeroState):
    """ZeRO 1 and 2: this rank's partition of each group, cut where parameters begin and end."""

    def ranges(self) -> Iterator[FlatRange]:
        for parameter in self._parameters:
            fragment = self._tensors[parameter.name]._hp_mapping  # type: ignore[attr-defined]
            if fragment is not None:
                flat = self._zero.single_partition_of_fp32_groups[fragment.param_group_index]
                place = fragment.hp_fragment_address
                start, group = fragment.lp_fragment_address.start, fragment.param_group_index
                yield FlatRange(parameter, start, place.numel, flat, place.start, group)


class _ShardedState(ZeroState):
    """ZeRO 3: this rank's partition of each parameter, which may end in padding, or be nothing else."""

    def ranges(self) -> Iterator[FlatRange]:
        for parameter in self._parameters:
            tensor: Any = self._tensors[parameter.name]
            group, offset, length = self._zero.grad_position[self._zero.get_param_id(tensor)]
            start = self._mesh.copies(parameter).rank * length
            size = min(length, tensor.ds_numel - start)
            if size > 0:
                flat = self._zero.fp32_partitioned_groups_flat[group]
                yield FlatRange(parameter, start, size, flat, offset, group)

    def _ensure_state(self) -> None:
        for group, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            # DeepSpeed leaves the groups of the optimizer empty but for the partition that it updates.
            updated = self._zero.optimizer.param_groups[self._zero.sub_group_to_group_id[group]]
            on_disk = self._on_disk(group) and not self._zero.optimizer.state[flat]
            if on_disk:
                self._zero._optimizer_states_and_gradient_swap_in(group)
            updated["params"] = [flat]
            ensure_state(self._zero.optimizer)
            updated["params"] = []
            if on_disk:
                self._zero._optimizer_states_and_gradient_swap_out(group)

    def _on_disk(self, group: int) -> bool:
        """Whether DeepSpeed keeps this partition in files between steps; small ones it does not."""
        return bool(self._zero._swappable_optimizer_subgroup(group))

    def _held(self, group: int, flat: Tensor) -> dict[str, Tensor]:
        state = super()._held(group, flat)
        if not self._on_disk(group):
            return state
        swapped = self._zero.optimizer_swapper.swap_params_info[flat.ds_id]  # type: ignore[attr-defined]
        files = {id(tensor.compute_tensor): tensor.swap_path for tensor in swapped.tensors}
        return {
            key: mapped(files[id(tensor)], swapped.numel(), tensor.dtype) for key, tensor in state.items()
        }

    def weights(self) -> Iterable[StateShard]:
        for flat_range in self.ranges():
            values = partition_of(self._tensors[flat_range.parameter.name]).narrow(0, 0, flat_range.size)
            yield StateShard(flat_range.parameter, WEIGHT, flat_range.start, values)

    def _refresh_masters(self) -> None:
        for flat_range in self.ranges():
            weight = partition_of(self._tensors[flat_range.parameter.name])
            flat_range.of(self._held(flat_range.group, flat_range.flat)[MASTER]).copy_(
                weight.narrow(0, 0, flat_range.size)
            )

    def load(self, scalars: Mapping[str, Any]) -> None:
        super().load(scalars)
        # Parameters that stay gathered between steps still have the values of before.
        self._zero._partition_all_parameters()
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)
