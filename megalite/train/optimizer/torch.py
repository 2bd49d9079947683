"""The optimizer without ZeRO: torch alone, the whole state on every rank with the same weights."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.model.replica import Replica
from megalite.model.transformer import Stage
from megalite.parallel.gradients import (
    all_reduce_replicated_gradients,
    clip_factor,
    clip_gradients,
    clip_values,
    first_nonfinite,
    global_norm,
    scale_gradients,
    squared_norm_share,
    sync_tied_weights,
)
from megalite.topology.parameters import Parameter
from megalite.topology.state import MASTER, OptimizerState, StateShard, state_parameter
from megalite.train.optimizer.adamw import OnePassAdamW
from megalite.train.optimizer.flat_range import FlatRange
from megalite.train.optimizer.loss_scale import LossScale
from megalite.train.optimizer.protocol import Update, skip_update
from megalite.train.optimizer.rule import OptimizerParts, ensure_state
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.update import (
    accumulate_in_float32,
    gradient_buckets,
    set_learning_rate,
    set_step_count,
    step_count,
    torch_optimizer,
)
from megalite.train.optimizer.update_norms import UpdateNorms


class TorchOptimizer:
    """Every data-parallel rank keeps the whole optimizer state of its stage and shard.

    A low-precision model has fp32 masters, which are updated and then rounded into its weights.
    """

    def __init__(self, replica: Replica, settings: OptimizerSettings):
        self._parameters, self._mesh, self._settings = replica.trained, replica.mesh, settings
        self._tensors = replica.trained_tensors
        if settings.training.accumulation == "fp32":
            accumulate_in_float32(self._tensors)
        self._masters = {name: _master(tensor) for name, tensor in self._tensors.items()}
        copies: dict[Tensor, nn.Parameter] = {
            master: self._tensors[name]
            for name, master in self._masters.items()
            if master is not self._tensors[name]
        }
        self._optimizer = torch_optimizer(
            OptimizerParts(settings, self._parameters, self._masters, self._mesh, copies)
        )
        self._ranges = [
            FlatRange(parameter, 0, master.numel(), master, copies=self._mesh.copies(parameter).size)
            for parameter, master in zip(self._parameters, self._masters.values(), strict=True)
        ]
        self._scale = LossScale.of(settings.training)
        self.buckets = gradient_buckets(replica)
        self.state: OptimizerState = _TorchState(replica, self._optimizer, self._masters, self._scale)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.value

    def wrap(self, stage: Stage) -> Callable[..., Tensor]:
        return stage

    def reduce_gradients(self) -> None:
        all_reduce_replicated_gradients(self._parameters, self._tensors, self._mesh)
        if self.buckets is not None:
            self.buckets.finish()

    def gradients(self) -> Iterator[tuple[Parameter, int, Tensor]]:
        for parameter in self._parameters:
            if (gradient := self._tensors[parameter.name].grad) is not None:
                yield parameter, 0, gradient.flatten()

    def squared_norm(self) -> Tensor:
        return squared_norm_share(self._parameters, self._tensors, self._mesh, ops=self._settings.operators)

    def step(self, learning_rate: float, squared_norm: float, norms: UpdateNorms | None = None) -> Update:
        scale = self.loss_scale
        norm = math.sqrt(squared_norm) / scale
        if not math.isfinite(norm):
            return self._skip()
        set_learning_rate(self._optimizer, learning_rate)
        update: Callable[[], object] = self._optimizer.step
        if norms is not None:
            norms.see_gradients(self._ranges, self._tensors, scale)
            update = partial(norms.step_by_module, self._optimizer, self._ranges)
        if isinstance(self._optimizer, OnePassAdamW):
            self._set_gradient_scale(self._optimizer, norm, 1 / scale)
            update()
            for tensor in self._tensors.values():
                tensor.grad = None
        else:
            self._hand_gradients_to_masters()
            gradients = _gradients(self._masters)
            if scale != 1:
                scale_gradients(gradients, 1 / scale)
            self._clip(gradients, norm)
            update()
            self._optimizer.zero_grad()
            _copy_masters(self._masters, self._tensors)
        sync_tied_weights(self._parameters, self._tensors, self._mesh)
        if self._scale is not None:
            self._scale.passed()
        return Update(norm)

    def _norm(self, tensors: Mapping[str, nn.Parameter]) -> float:
        return global_norm(self._parameters, tensors, self._mesh, ops=self._settings.operators)

    def _set_gradient_scale(self, optimizer: OnePassAdamW, norm: float, scale: float) -> None:
        """Have the update scale and clip the gradients of the low-precision weights; by value they are clipped here.

        scale: the factor of the gradients. norm: of the scaled gradients.
        """
        settings = self._settings.optimizer
        if settings.clip_value > 0:
            gradients = _gradients(self._tensors)
            scale_gradients(gradients, scale)
            clip_values(gradients, limit=settings.clip_value)
            norm, scale = self._norm(self._tensors), 1.0
        optimizer.gradient_scale = scale * clip_factor(norm, settings.gradient_clipping)

    def _skip(self) -> Update:
        """Leave out an update whose gradient is not finite, on every rank alike; raises as `skip_update`."""
        tensor = first_nonfinite(self._parameters, self._tensors, self._mesh)
        update = skip_update(self._scale, tensor, skip_nonfinite=self._settings.training.nonfinite != "stop")
        self.skip()
        return update

    def skip(self) -> None:
        for weight in self._tensors.values():
            weight.grad = None

    def _hand_gradients_to_masters(self) -> None:
        for name, master in self._masters.items():
            tensor = self._tensors[name]
            if master is not tensor and tensor.grad is not None:
                master.grad, tensor.grad = tensor.grad.to(master.dtype), None

    def _clip(self, gradients: Sequence[Tensor], norm: float) -> None:
        """Clip by value, then by the global norm of the clipped gradient."""
        settings = self._settings.optimizer
        if settings.clip_value > 0:
            clip_values(gradients, limit=settings.clip_value)
            norm = self._norm(self._masters)
        if settings.gradient_clipping > 0:
            clip_gradients(gradients, norm=norm, max_norm=settings.gradient_clipping)


def _master(tensor: nn.Parameter) -> nn.Parameter:
    """The tensor that is updated for a parameter: an fp32 copy of a low-precision one, else the parameter itself."""
    return nn.Parameter(tensor.detach().float()) if tensor.element_size() < 4 else tensor


@torch.no_grad()
def _copy_masters(masters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Round the masters into the low-precision weights."""
    if copied := [name for name, master in masters.items() if master is not tensors[name]]:
        torch._foreach_copy_([tensors[name] for name in copied], [masters[name] for name in copied])


def _gradients(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors.values() if tensor.grad is not None]


class _TorchState:
    """The torch optimizer's state for the checkpoint: whole local shards, each written by one of its holders."""

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        masters: Mapping[str, nn.Parameter],
        scale: LossScale | None,
    ):
        self._optimizer, self._parameters, self._mesh = optimizer, replica.trained, replica.mesh
        self._tensors, self._masters, self._scale = replica.trained_tensors, masters, scale

    def weights(self) -> None:
        return None

    def shards(self) -> Iterator[StateShard]:
        ensure_state(self._optimizer)
        for turn, parameter in enumerate(self._parameters):
            owned = self._mesh.writes(parameter, turn)
            master = self._masters[parameter.name]
            state = {key: values for key, values in self._optimizer.state[master].items() if key != "step"}
            if master is not self._tensors[parameter.name]:
                state[MASTER] = master.detach()
            for key, values in state.items():
                yield StateShard(state_parameter(parameter, key), key, 0, values.view(-1), owned)

    def scalars(self) -> dict[str, Any]:
        scale = {} if self._scale is None else self._scale.scalars()
        return {"step": step_count(self._optimizer), **scale}

    def load(self, scalars: Mapping[str, Any]) -> None:
        ensure_state(self._optimizer)
        set_step_count(self._optimizer, float(scalars["step"]))
        if self._scale is not None:
            self._scale.load(scalars)
        _copy_masters(self._masters, self._tensors)
