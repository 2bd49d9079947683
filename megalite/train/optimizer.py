"""What the trainer asks of an optimizer, and the torch implementation of it (no ZeRO)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.errors import TrainingError
from megalite.parallel.gradients import (
    average_over_data,
    clip_gradients,
    complete_gradients,
    copy_shared_weights,
    global_norm,
)
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.topology.state import OptimizerState, StateShard


@dataclass(frozen=True)
class Update:
    """What one `step` did.

    grad_norm: the global norm of the gradient, without the loss scale, before clipping.
    skipped: an fp16 overflow: no weight was changed. overflow: the first tensor with a gradient that is not finite.
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

        Raises TrainingError, on every rank alike and before any weight changes, when the norm is not finite.
        """
        ...


@dataclass(frozen=True)
class OptimizerSettings:
    """Hyperparameters as the config has them; `gradient_clipping` 0 means no clipping."""

    name: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float
    gradient_clipping: float


def torch_optimizer(
    settings: OptimizerSettings, parameters: Sequence[Parameter], tensors: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD, with no weight decay on norms and biases."""
    groups = [
        {"params": [tensors[p.name] for p in parameters if p.decay], "weight_decay": settings.weight_decay},
        {"params": [tensors[p.name] for p in parameters if not p.decay], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def require_finite(norm: float) -> None:
    """Raises TrainingError when the gradient norm is inf or nan."""
    if not torch.isfinite(torch.tensor(norm)):
        raise TrainingError(
            f"the gradient norm is {norm}: no weight was changed; lower optimizer.learning_rate, set"
            " optimizer.gradient_clipping, or look at the data of this step, then run again to resume"
        )


class TorchOptimizer:
    """Every data-parallel rank keeps the whole optimizer state of its stage and shard."""

    def __init__(
        self,
        stage: nn.Module,
        parameters: Sequence[Parameter],
        mesh: ParallelMesh,
        settings: OptimizerSettings,
    ):
        self._stage, self._parameters, self._mesh, self._settings = stage, parameters, mesh, settings
        self._tensors = dict(stage.named_parameters())
        self._optimizer = torch_optimizer(settings, parameters, self._tensors)
        self.state: OptimizerState = _TorchState(self._optimizer, parameters, self._tensors, mesh)

    @property
    def loss_scale(self) -> float:
        return 1.0

    def forward(self, input_ids: Tensor, **arguments: Tensor) -> Tensor:
        losses: Tensor = self._stage(input_ids, **arguments)
        return losses

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        yield
        complete_gradients(self._parameters, self._tensors, self._mesh)
        average_over_data(self._gradients(), self._mesh)

    def step(self, learning_rate: float) -> Update:
        norm = global_norm(self._parameters, self._tensors, self._mesh)
        require_finite(norm)
        if self._settings.gradient_clipping > 0:
            clip_gradients(self._gradients(), norm=norm, max_norm=self._settings.gradient_clipping)
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        copy_shared_weights(self._parameters, self._tensors, self._mesh)
        return Update(norm)

    def _gradients(self) -> list[Tensor]:
        return [tensor.grad for tensor in self._tensors.values() if tensor.grad is not None]


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the zero state that the first step would create, so that a checkpoint has a place to load into."""
    adam = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if adam and "step" not in state:
                # The types torch itself uses: a float32 tensor for the count.
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(tensor)
                state["exp_avg_sq"] = torch.zeros_like(tensor)
            elif not adam and group["momentum"] and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(tensor)


def step_count(optimizer: torch.optim.Optimizer) -> float:
    """How many updates Adam has made; its bias correction depends on it. 0 for SGD."""
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=0.0)


def set_step_count(optimizer: torch.optim.Optimizer, count: float) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(count)


class _TorchState:
    """The torch optimizer's state for the checkpoint: whole local shards, written by one dp rank each."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Parameter],
        tensors: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
    ):
        self._optimizer, self._parameters, self._tensors, self._mesh = optimizer, parameters, tensors, mesh

    def shards(self) -> Iterator[StateShard]:
        ensure_state(self._optimizer)
        for index, parameter in enumerate(self._parameters):
            # Writing is spread over the data-parallel ranks, a parameter each in turn.
            owned = index % self._mesh.dp.size == self._mesh.dp.rank
            for key, values in self._optimizer.state[self._tensors[parameter.name]].items():
                if key != "step":
                    yield StateShard(parameter, key, 0, values.view(-1), owned)

    def scalars(self) -> dict[str, Any]:
        return {"step": step_count(self._optimizer)}

    def load(self, scalars: Mapping[str, Any]) -> None:
        ensure_state(self._optimizer)
        set_step_count(self._optimizer, float(scalars["step"]))
