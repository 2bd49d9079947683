"""Make torch's optimizer for the torch and the DeepSpeed path, and read and set its state and step count."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.topology.state import EMA
from megalite.train.fused_adamw import OnePassAdamW
from megalite.train.optimizer.adafactor import Adafactor
from megalite.train.optimizer.lion import Lion
from megalite.train.optimizer.muon import Muon
from megalite.train.optimizer.rule import UpdateRule
from megalite.train.optimizer.settings import OptimizerSettings, filled_groups


def torch_optimizer(
    settings: OptimizerSettings,
    parameters: Sequence[Parameter],
    tensors: Mapping[str, nn.Parameter],
    mesh: ParallelMesh,
    copies: Mapping[Tensor, nn.Parameter] | None = None,
    matrix_dtype: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of the settings, with the moving average of the weights if ema_decay is set.

    AdamW (Loshchilov and Hutter 2019), SGD, Lion, Adafactor or Muon, over `parameters`, which may be some of a model's.

    mesh: over which Muon and Adafactor see whole tensors. copies: master in `tensors` -> the low-precision weight that
    AdamW writes with it. matrix_dtype: of Muon's products; None: that of the tensors.
    """
    groups = filled_groups(settings, parameters, tensors)
    optimizer: torch.optim.Optimizer
    if settings.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    elif settings.name == "lion":
        optimizer = Lion(groups, betas=settings.betas)
    elif settings.name == "adafactor":
        optimizer = Adafactor(groups, {tensors[each.name]: each for each in parameters}, mesh)
    elif settings.name == "muon":
        optimizer = _muon(settings, parameters, tensors, mesh, matrix_dtype)
    elif copies is not None:
        update = settings.operators.adamw
        optimizer = OnePassAdamW(groups, copies, betas=settings.betas, eps=settings.eps, update=update)
        optimizer.register_step_pre_hook(lambda self, _arguments, _keywords: ensure_state(self))
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    keep_average(optimizer, settings)
    return optimizer


def _muon(
    settings: OptimizerSettings,
    parameters: Sequence[Parameter],
    tensors: Mapping[str, nn.Parameter],
    mesh: ParallelMesh,
    dtype: torch.dtype | None,
) -> Muon:
    matrices = [each for each in parameters if each.is_hidden_matrix]
    others = [each for each in parameters if not each.is_hidden_matrix]
    return Muon(
        filled_groups(settings, matrices, tensors),
        filled_groups(settings, others, tensors),
        {tensors[each.name]: each for each in matrices},
        mesh,
        momentum=settings.momentum,
        betas=settings.betas,
        eps=settings.eps,
        dtype=dtype,
    )


def keep_average(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
    """Keep the average of the weights, if asked for: by hooks, as it may update masters or ZeRO's partitions."""
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


def accumulate_in_float32(tensors: Mapping[str, nn.Parameter]) -> None:
    """Let autograd sum the gradients of low-precision parameters in fp32."""
    for tensor in tensors.values():
        if tensor.element_size() < 4:
            tensor.grad_dtype = torch.float32


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, so that a checkpoint has a place to load into."""
    adam = "betas" in optimizer.defaults
    counts_in_tensors = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if isinstance(optimizer, UpdateRule):
                first = optimizer.initial_state(tensor) if state.keys() <= {EMA} else {}
                state.update(first)
            elif adam and "step" not in state:
                # torch's fused update needs a float32 tensor on the weight's device, DeepSpeed's a number, and ours
                # reads it on the host.
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
    """Return the number of updates so far, for Adam's bias correction; 0 for SGD and Lion, which do not count."""
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=0.0)


def set_step_count(optimizer: torch.optim.Optimizer, count: float) -> None:
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(count)
        elif "step" in state:
            state["step"] = int(count)
