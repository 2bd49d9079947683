"""NVIDIA Apex's compiled parts, used where they truly are.

An `apex` can be a package for another framework altogether, or NVIDIA's own without its compiled modules: so what is
imported is the compiled module, what is asked for the symbol, and what is trusted is a result compared with torch's.
MEGALITE_NO_APEX=1 leaves them all alone.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megalite.launcher.environment import without_apex

_LOG = logging.getLogger(__name__)
_CHUNK = 2048 * 32  # elements a block of threads works through, as Apex's own optimizers have it
# part -> the compiled module and the symbol in it.
PARTS = {
    "norm": ("amp_C", "multi_tensor_l2norm"),
    "scale": ("amp_C", "multi_tensor_scale"),
    "AdamW": ("amp_C", "multi_tensor_adam"),
    "weight gradients": ("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"),
}

Norm = Callable[[Sequence[Tensor]], Tensor]
Scale = Callable[[Sequence[Tensor], float], None]
Update = Callable[..., None]
Accumulate = Callable[[Tensor, Tensor, Tensor], None]


def l2_norm(device: torch.device) -> Norm | None:
    """norm(tensors of one type) -> their joint L2 norm, a float32 number on their device; None: not by Apex."""
    return _serve("norm", device)


def scale(device: torch.device) -> Scale | None:
    """scale(tensors of one type, factor), in place; None: not by Apex."""
    return _serve("scale", device)


def adamw(device: torch.device) -> Update | None:
    """As ops.adamw.adamw_ without copies and scale, for float32; None: not by Apex."""
    return _serve("AdamW", device)


def accumulate_weight_gradient(device: torch.device) -> Accumulate | None:
    """accumulate(inputs [N, in], gradient of outputs [N, out], total float32 [out, in]); None: not by Apex."""
    return _serve("weight gradients", device)


def choices() -> dict[str, str]:
    """Each part, and whether it is used on this machine's GPU or why not."""
    device = _device()
    if device is None:
        return dict.fromkeys(PARTS, "not used: torch sees no GPU")
    return {part: _choose(part, device)[1] for part in PARTS}


def _serve(part: str, device: torch.device) -> Any:
    chosen = _device()
    return _choose(part, chosen)[0] if chosen is not None and device.type == chosen.type else None


def _device() -> torch.device | None:
    """Where Apex's kernels run."""
    return torch.device("cuda") if torch.cuda.is_available() else None


@cache
def _choose(part: str, device: torch.device) -> tuple[Any, str]:
    """The part in our own terms if it is there and right, and in words what was decided. Logged once."""
    module_name, symbol = PARTS[part]
    try:
        made = None if without_apex() else _SERVED[part](_compiled(module_name, symbol), device)
        said = "not used: MEGALITE_NO_APEX=1" if made is None else f"{module_name}.{symbol}"
    except Exception as error:  # whatever another project's module raises when it is imported or called
        made, said = None, f"not used: {type(error).__name__}: {error}"
    _LOG.info("Apex, %s: %s", part, said)
    return made, said


def _compiled(name: str, symbol: str) -> Any:
    """The symbol of a compiled module; AttributeError, ImportError or anything else where there is none."""
    module: ModuleType = importlib.import_module(name)
    found = getattr(module, symbol)
    if not callable(found):
        raise TypeError(f"{name}.{symbol} cannot be called")
    return found


def _require(what: str, actual: Tensor, expected: Tensor) -> None:
    if not torch.allclose(actual, expected.to(actual.dtype), rtol=1e-3, atol=1e-5):
        raise ValueError(
            f"{what} gave {actual.flatten()[:4].tolist()}, not {expected.flatten()[:4].tolist()}"
        )


def _flag(device: torch.device) -> Tensor:
    """Where a kernel says that it met an infinity; they want it, and it is not read: the norm tells."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _norm(function: Any, device: torch.device) -> Norm:
    def norm(tensors: Sequence[Tensor]) -> Tensor:
        found: Tensor = function(_CHUNK, _flag(tensors[0].device), [[*tensors]], False)[0]
        return found.view(())

    _require(
        "the norm of 3 and 4",
        norm([torch.tensor([3.0, 4.0], device=device)]),
        torch.tensor(5.0, device=device),
    )
    return norm


def _scale(function: Any, device: torch.device) -> Scale:
    def scaled(tensors: Sequence[Tensor], factor: float) -> None:
        function(_CHUNK, _flag(tensors[0].device), [[*tensors], [*tensors]], factor)

    probe = torch.tensor([3.0, -4.0], device=device)
    scaled([probe], 0.5)
    _require("3 and -4 halved", probe, torch.tensor([1.5, -2.0], device=device))
    return scaled


def _adamw(function: Any, device: torch.device) -> Update:
    def update(
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
    ) -> None:
        lists = [[*gradients], [*weights], [*exp_avgs], [*exp_avg_sqs]]
        decoupled, corrected = 1, 1
        function(
            _CHUNK,
            _flag(weights[0].device),
            lists,
            learning_rate,
            *betas,
            eps,
            step,
            decoupled,
            corrected,
            weight_decay,
        )

    weight, mean, square = (torch.full((3,), value, device=device) for value in (2.0, 0.0, 0.0))
    gradient = torch.tensor([1.0, -1.0, 3.0], device=device)
    rules: dict[str, Any] = {
        "learning_rate": 0.1,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.5,
        "step": 1,
    }
    update([weight], [gradient], [mean], [square], **rules)
    # The first update goes one learning rate against the gradient's sign, from weights decayed by 0.1 * 0.5.
    _require("an update", weight, torch.tensor([1.8, 2.0, 1.8], device=device))
    return update


def _accumulate(function: Any, device: torch.device) -> Accumulate:
    def accumulate(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
        function(inputs, gradient, total)

    inputs = torch.arange(32.0, device=device).view(4, 8).bfloat16()
    gradient = torch.arange(64.0, device=device).view(4, 16).bfloat16()
    total = torch.ones(16, 8, device=device)
    accumulate(inputs, gradient, total)
    _require("a weight's gradient", total, 1 + gradient.float().t() @ inputs.float())
    return accumulate


_SERVED: dict[str, Callable[[Any, torch.device], Any]] = {
    "norm": _norm,
    "scale": _scale,
    "AdamW": _adamw,
    "weight gradients": _accumulate,
}
