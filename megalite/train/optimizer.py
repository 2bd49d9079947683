"""What the trainer asks of an optimizer, and the torch implementation of it (no ZeRO)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.errors import TrainingError
from megalite.ops import apex
from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.parallel.gradient_sums import sum_in_place
from megalite.parallel.gradients import (
    average_over_data,
    clip_factor,
    clip_gradients,
    clip_values,
    complete_gradients,
    copy_shared_weights,
    first_nonfinite,
    global_norm,
    scale_gradients,
)
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameter_groups import ParameterGroup, group_of
from megalite.topology.parameters import Parameter
from megalite.topology.state import EMA, MASTER, OptimizerState, StateShard
from megalite.train.fused_adamw import OnePassAdamW
from megalite.train.loss_scale import LossScale, LossScaleSettings


@dataclass(frozen=True)
class Update:
    """What one `step` did.

    grad_norm: the global norm of the gradient, without the loss scale, before clipping.
    skipped: no weight was changed, since the gradient is not finite. overflow: the first tensor where it is not.
    """

    grad_norm: float
    skipped: bool = False
    overflow: str | None = None


class Optimizer(Protocol):
    """The trainer's view: gradients are gathered inside `accumulating`, then one `step`."""

    state: OptimizerState

    @property
    def loss_scale(self) -> float:
        """What the gradients of the coming step are to be multiplied by; 1 unless the precision is fp16."""
        ...

    def forward(self, input_ids: Tensor, **arguments: Tensor) -> Tensor:
        """The model's forward where there is one stage; an engine may gather weights around it."""
        ...

    def accumulating(self) -> AbstractContextManager[None]:
        """Around all forwards and backwards of one step; at its end gradients are complete over stages and dp."""
        ...

    def step(self, learning_rate: float) -> Update:
        """Clip, update, clear gradients.

        Raises TrainingError, on every rank alike and before any weight changes, when the norm is not finite, unless
        the settings leave such a step out.
        """
        ...


@dataclass(frozen=True)
class OptimizerSettings:
    """Hyperparameters as the config has them; 0 switches clipping and the average of weights off.

    accumulate_wide: gradients of 16-bit weights are summed in float32. skip_nonfinite: leave out an update that is not
    finite, where no loss scale does so. loss_scale: None where there is none. native: DeepSpeed's own AdamW updates,
    which ZeRO alone has. operators: which implementation of each is used.
    sum_in_place: a backward runs each linear once, which may then add to the sum of earlier micro batches itself.
    """

    name: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float
    gradient_clipping: float
    clip_value: float = 0.0
    groups: tuple[ParameterGroup, ...] = ()
    ema_decay: float = 0.0
    accumulate_wide: bool = True
    skip_nonfinite: bool = False
    loss_scale: LossScaleSettings | None = None
    native: bool = False
    operators: Operators = PLAIN_TORCH
    sum_in_place: bool = False


def update_groups(
    settings: OptimizerSettings, parameters: Sequence[Parameter], tensors: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """The parameters as torch's groups, one for each rule of update: the same on every rank, some with nobody.

    What is in no group of the settings has the schedule's learning rate, and weight decay unless it is a norm or
    a bias.
    """
    found: list[dict[str, Any]] = []
    for group in (None, *settings.groups):
        ratio = 1.0 if group is None else group.learning_rate_ratio
        given = None if group is None else group.weight_decay
        for decays in (True, False):
            members = [p for p in parameters if group_of(p, settings.groups) == group and p.decay == decays]
            decay = settings.weight_decay if decays else 0.0
            found.append(
                {
                    "params": [tensors[each.name] for each in members],
                    "learning_rate_ratio": ratio,
                    "weight_decay": decay if given is None else given,
                    "ema_decay": settings.ema_decay,
                }
            )
    return found


def filled_groups(
    settings: OptimizerSettings, parameters: Sequence[Parameter], tensors: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Those of `update_groups` that have somebody, as an optimizer takes them."""
    return [group for group in update_groups(settings, parameters, tensors) if group["params"]]


def torch_optimizer(
    settings: OptimizerSettings,
    parameters: Sequence[Parameter],
    tensors: Mapping[str, nn.Parameter],
    copies: Mapping[Tensor, nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD, which also keeps the average of the weights if it is asked for.

    copies: the 16-bit weights that AdamW is to write with `tensors`, their masters.
    """
    groups = filled_groups(settings, parameters, tensors)
    optimizer: torch.optim.Optimizer
    if settings.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    elif copies is not None:
        update = settings.operators.adamw
        optimizer = OnePassAdamW(groups, copies, betas=settings.betas, eps=settings.eps, update=update)
        optimizer.register_step_pre_hook(lambda self, _arguments, _keywords: ensure_state(self))
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    keep_average(optimizer, settings)
    return optimizer


def keep_average(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
    """Have it average what it updates, if that is asked for: by hooks, as these may be masters or ZeRO's partitions."""
    if settings.ema_decay:
        optimizer.register_step_pre_hook(lambda self, _arguments, _keywords: ensure_state(self))
        optimizer.register_step_post_hook(lambda self, _arguments, _keywords: _average_weights(self))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["learning_rate_ratio"]


@torch.no_grad()
def _average_weights(optimizer: torch.optim.Optimizer) -> None:
    """Move the exponential moving average of the weights (Polyak and Juditsky 1992) towards the new ones."""
    for group in optimizer.param_groups:
        averages = [optimizer.state[tensor][EMA] for tensor in group["params"]]
        torch._foreach_lerp_(averages, list(group["params"]), 1 - group["ema_decay"])


def require_finite(norm: float, tensor: str | None = None) -> None:
    """Raises TrainingError, naming the tensor where it arose, when the gradient norm is inf or nan."""
    if not math.isfinite(norm):
        where = f", from the gradient of {tensor} on" if tensor is not None else ""
        raise TrainingError(
            f"the gradient norm is {norm}{where}: no weight was changed; lower optimizer.learning_rate, set"
            " optimizer.gradient_clipping, or look at the data of this step, then run again to resume"
        )


def skip_update(scale: LossScale | None, norm: float, tensor: str | None, *, skip_nonfinite: bool) -> Update:
    """Lower the scale for the overflow that arose in the gradient of `tensor`. Raises TrainingError where it cannot
    be lowered, or is none and the step is not to be left out: `norm` is not finite."""
    if scale is None:
        if not skip_nonfinite:
            require_finite(norm, tensor)
    elif scale.exhausted:
        raise TrainingError(
            f"fp16 overflows in the gradient of {tensor} at the smallest loss scale, {scale.value:g}:"
            ' no weight was changed; use training.precision = "bf16", or lower optimizer.learning_rate,'
            " then run again to resume"
        )
    else:
        scale.overflowed()
    return Update(norm, skipped=True, overflow=tensor)


def accumulate_in_float32(tensors: Mapping[str, nn.Parameter]) -> None:
    """Let autograd sum the gradients of 16-bit parameters in float32."""
    for tensor in tensors.values():
        if tensor.element_size() < 4:
            tensor.grad_dtype = torch.float32


class TorchOptimizer:
    """Every data-parallel rank keeps the whole optimizer state of its stage and shard.

    The weights of a 16-bit model are copies of float32 masters, which are what is updated.
    """

    def __init__(
        self,
        stage: nn.Module,
        parameters: Sequence[Parameter],
        mesh: ParallelMesh,
        settings: OptimizerSettings,
    ):
        self._stage, self._parameters, self._mesh, self._settings = stage, parameters, mesh, settings
        self._tensors = dict(stage.named_parameters())
        if settings.accumulate_wide:
            accumulate_in_float32(self._tensors)
            adds = (
                settings.operators.uses("accumulate")
                or apex.accumulate_weight_gradient(mesh.device) is not None
            )
            if settings.sum_in_place and adds:
                sum_in_place(self._tensors.values(), settings.operators.accumulate)
        self._masters = {name: _master(tensor) for name, tensor in self._tensors.items()}
        self._optimizer = torch_optimizer(settings, parameters, self._masters, self._copies())
        self._scale = LossScale(settings.loss_scale) if settings.loss_scale is not None else None
        self.state: OptimizerState = _TorchState(
            self._optimizer, parameters, self._tensors, self._masters, self._scale, mesh
        )

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.value

    def forward(self, input_ids: Tensor, **arguments: Tensor) -> Tensor:
        losses: Tensor = self._stage(input_ids, **arguments)
        return losses

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        yield
        complete_gradients(self._parameters, self._tensors, self._mesh)
        average_over_data(_gradients(self._tensors), self._mesh)

    def step(self, learning_rate: float) -> Update:
        scale = self.loss_scale
        norm = self._norm(self._tensors) / scale
        # The norm is finite on all ranks or on none: a gradient that is not has reached all by the collectives.
        if not math.isfinite(norm):
            return self._skip(norm)
        set_learning_rate(self._optimizer, learning_rate)
        if isinstance(self._optimizer, OnePassAdamW):
            self._step_in_one_pass(self._optimizer, norm)
        else:
            self._hand_gradients_to_masters()
            gradients = _gradients(self._masters)
            if scale != 1:
                scale_gradients(gradients, 1 / scale)
            self._clip(gradients, norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
            _copy_masters(self._masters, self._tensors)
        copy_shared_weights(self._parameters, self._tensors, self._mesh)
        if self._scale is not None:
            self._scale.passed()
        return Update(norm)

    def _copies(self) -> Mapping[Tensor, nn.Parameter] | None:
        """The 16-bit weight of each master, if there are masters; None where torch's own update is to be taken."""
        settings, device = self._settings, self._mesh.device
        named = {master: self._tensors[name] for name, master in self._masters.items()}
        copies: dict[Tensor, nn.Parameter] = {
            master: copy for master, copy in named.items() if master is not copy
        }
        faster = settings.operators.uses("adamw") and (device.type == "cpu" or bool(copies))
        # In place, clipping values of 16 bits would round them.
        rounds = bool(copies) and settings.clip_value > 0 and not settings.accumulate_wide
        return copies if (faster or apex.adamw(device)) and not rounds else None

    def _norm(self, tensors: Mapping[str, nn.Parameter]) -> float:
        return global_norm(self._parameters, tensors, self._mesh, ops=self._settings.operators)

    def _step_in_one_pass(self, optimizer: OnePassAdamW, norm: float) -> None:
        """From the 16-bit weights' own gradients, which are read once more for each value that is clipped."""
        settings, scale = self._settings, 1 / self.loss_scale
        if settings.clip_value > 0:
            gradients = _gradients(self._tensors)
            scale_gradients(gradients, scale)
            clip_values(gradients, limit=settings.clip_value)
            norm, scale = self._norm(self._tensors), 1.0
        optimizer.gradient_scale = scale * clip_factor(norm, settings.gradient_clipping)
        optimizer.step()
        for tensor in self._tensors.values():
            tensor.grad = None

    def _skip(self, norm: float) -> Update:
        """Leave out the update of an overflow, on every rank alike. Raises TrainingError where it is none."""
        tensor = first_nonfinite(self._parameters, self._tensors, self._mesh)
        update = skip_update(self._scale, norm, tensor, skip_nonfinite=self._settings.skip_nonfinite)
        for held in self._tensors.values():
            held.grad = None
        return update

    def _hand_gradients_to_masters(self) -> None:
        for name, master in self._masters.items():
            tensor = self._tensors[name]
            if master is not tensor and tensor.grad is not None:
                master.grad, tensor.grad = tensor.grad.to(master.dtype), None

    def _clip(self, gradients: Sequence[Tensor], norm: float) -> None:
        """By value, then by the norm of what that leaves."""
        settings = self._settings
        if settings.clip_value > 0:
            clip_values(gradients, limit=settings.clip_value)
            norm = self._norm(self._masters)
        if settings.gradient_clipping > 0:
            clip_gradients(gradients, norm=norm, max_norm=settings.gradient_clipping)


def _master(tensor: nn.Parameter) -> nn.Parameter:
    """What is updated in a parameter's place: a float32 copy of a 16-bit one, any other itself."""
    return nn.Parameter(tensor.detach().float()) if tensor.element_size() < 4 else tensor


@torch.no_grad()
def _copy_masters(masters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Make 16-bit weights the rounded values of their masters."""
    for name, master in masters.items():
        if master is not tensors[name]:
            tensors[name].copy_(master)


def _gradients(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors.values() if tensor.grad is not None]


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, so that a checkpoint has a place to load into."""
    adam = "betas" in optimizer.defaults
    counts_in_tensors = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if adam and "step" not in state:
                # As each has it itself: torch's fused update wants a float32 tensor beside the weight, DeepSpeed's a
                # number, and ours reads it on the host.
                on_host = isinstance(optimizer, OnePassAdamW)
                zero = torch.zeros((), dtype=torch.float32, device="cpu" if on_host else tensor.device)
                state["step"] = zero if counts_in_tensors else 0
                state["exp_avg"] = torch.zeros_like(tensor)
                state["exp_avg_sq"] = torch.zeros_like(tensor)
            elif not adam and group["momentum"] and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(tensor)
            if group["ema_decay"] and EMA not in state:
                state[EMA] = tensor.detach().clone()


def step_count(optimizer: torch.optim.Optimizer) -> float:
    """How many updates Adam has made; its bias correction depends on it. 0 for SGD."""
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=0.0)


def set_step_count(optimizer: torch.optim.Optimizer, count: float) -> None:
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(count)
        elif "step" in state:
            state["step"] = int(count)


class _TorchState:
    """The torch optimizer's state for the checkpoint: whole local shards, written by one dp rank each."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Parameter],
        tensors: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        scale: LossScale | None,
        mesh: ParallelMesh,
    ):
        self._optimizer, self._parameters, self._mesh = optimizer, parameters, mesh
        self._tensors, self._masters, self._scale = tensors, masters, scale

    def weights(self) -> None:
        return None

    def shards(self) -> Iterator[StateShard]:
        ensure_state(self._optimizer)
        for index, parameter in enumerate(self._parameters):
            # Writing is spread over the data-parallel ranks, a parameter each in turn.
            owned = index % self._mesh.dp.size == self._mesh.dp.rank
            master = self._masters[parameter.name]
            held = {key: values for key, values in self._optimizer.state[master].items() if key != "step"}
            if master is not self._tensors[parameter.name]:
                held[MASTER] = master.detach()
            for key, values in held.items():
                yield StateShard(parameter, key, 0, values.view(-1), owned)

    def scalars(self) -> dict[str, Any]:
        scale = {} if self._scale is None else self._scale.scalars()
        return {"step": step_count(self._optimizer), **scale}

    def load(self, scalars: Mapping[str, Any]) -> None:
        ensure_state(self._optimizer)
        set_step_count(self._optimizer, float(scalars["step"]))
        if self._scale is not None:
            self._scale.load(scalars)
        _copy_masters(self._masters, self._tensors)
