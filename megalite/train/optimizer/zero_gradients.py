"""ZeRO 1's gradients: summed by our buckets during the last backward, then cut into DeepSpeed's partitions.

DeepSpeed itself would start its sums after the last backward, and copy all gradients into its buffers and back.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.model.replica import Replica
from megalite.topology.parameters import Parameter
from megalite.train.optimizer.update import gradient_buckets


class ZeroOneGradients:
    """Sums a step's gradients and hands them to `zero`, the optimizer that DeepSpeed made for ZeRO 1."""

    def __init__(self, replica: Replica, zero: Any, config: Mapping[str, Any]):
        """config: `zero_optimization` of DeepSpeed's JSON, as the user wrote it."""
        self._zero, self._mesh = zero, replica.mesh
        size = max(tensor.element_size() for tensor in replica.trained_tensors.values())
        self._sums = gradient_buckets(
            replica,
            bucket_bytes=int(config.get("reduce_bucket_size", 0)) * size,
            dtype=self._zero.communication_data_type,
        )
        self.early_sums = self._sums if config.get("overlap_comm", True) else None
        """The sums for the pipeline, which starts them during the last backward."""
        for hook in self._zero._grad_acc_hooks:
            # They would reduce in backward, or count its gradients for nothing.
            hook.remove()
        self._zero.set_gradient_accumulation_boundary(True)
        self._parameters = {id(replica.trained_tensors[each.name]): each for each in replica.trained}
        self._handed_over: dict[int, Sequence[Tensor]] = {}

    def finish_sums(self) -> None:
        """Wait for the sums over the data-parallel ranks. Collective."""
        if self._sums is not None:
            self._sums.finish()

    @torch.no_grad()
    def hand_over(self) -> None:
        """Move each gradient's part in this rank's partitions from `.grad` to where DeepSpeed's step expects it."""
        for group, tensors in enumerate(self._zero.params_in_partition):
            _free(self._zero.params_not_in_partition[group])
            self._handed_over[group] = self._zero._build_compact_grad_partition_buffer(group)
            self._zero.averaged_gradients[group] = self._handed_over[group]
            for tensor, start, part in self._parts(group):
                if tensor.grad is not None:
                    part.copy_(tensor.grad.flatten()[start:][: part.numel()])
            if self._zero.cpu_offload:
                for tensor in tensors:
                    self._zero.copy_grads_in_partition(tensor, group)
            _free(tensors)

    def handed_over(self) -> Iterator[tuple[Parameter, int, Tensor]]:
        """Yield the flat ranges of gradients in this rank's partitions: the parameter, where they start, their values.

        They are unchanged where DeepSpeed skipped the step, and clipped where it did not.
        """
        for group in self._handed_over:
            for tensor, start, gradient in self._parts(group):
                yield self._parameters[id(tensor)], start, gradient

    def forget(self) -> None:
        """Free the gradients, once the step is done."""
        self._handed_over.clear()

    def _parts(self, group: int) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Yield each parameter with gradients in this rank's partition, its first element there, and its gradients."""
        gradients = [
            each.view(-1) for each in self._handed_over[group] if not getattr(each, "_zero_padding", False)
        ]
        for tensor, gradient in zip(self._zero.params_in_partition[group], gradients, strict=True):
            rank = self._mesh.copies(self._parameters[id(tensor)]).rank
            yield tensor, self._zero.grad_start_offset[group][rank][self._zero.get_param_id(tensor)], gradient


def _free(tensors: Sequence[nn.Parameter]) -> None:
    for tensor in tensors:
        tensor.grad = None
