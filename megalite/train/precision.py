"""The number type of weights and activations, and what "auto" makes of it on this machine."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
# The speed-up from which bf16 is worth its three digits; also keeps noise from deciding.
_WORTHWHILE = 1.25
_PRODUCT_SIZE = 512
_PRODUCTS = 5
_PRODUCTS_SECONDS = 0.1


@dataclass(frozen=True)
class Precision:
    """A number type by its name in DTYPES, and what the user should know of the choice; empty: nothing."""

    name: str
    note: str = ""
    warning: str = ""


def choose_precision(asked: str, device: torch.device, resumed: Any = None) -> Precision:
    """What `training.precision` = `asked` means on this machine.

    resumed: the precision with which the run that goes on was trained, None for a new one: "auto" keeps it, so
    that no curve changes with the machine. On a CPU this times a product for up to 0.3 s: ask on one rank.
    """
    if asked == "auto" and resumed in DTYPES:
        return Precision(resumed, f'training.precision: "auto" goes on with "{resumed}", as the run began')
    if device.type != "cpu":
        capable = torch.get_device_module(device).is_bf16_supported(including_emulation=False)
        return Precision(("bf16" if capable else "fp32") if asked == "auto" else asked)
    if asked == "auto":
        gain = _speed("bf16")
        if gain < _WORTHWHILE:
            return Precision("fp32")
        return Precision(
            "bf16", f'training.precision: "auto" is "bf16", {gain:.1f} times as fast here as "fp32"'
        )
    if asked in ("bf16", "fp16") and (gain := _speed(asked)) < 1:
        cost = f'"{asked}" takes {1 / gain:.1f} times as long as "fp32" in a matrix product on this CPU'
        return Precision(asked, warning=f'training.precision: {cost}; "fp32" or "auto" trains faster')
    return Precision(asked)


def _speed(precision: str) -> float:
    """How often a product in this type fits into the time of one in float32."""
    return product_seconds(torch.float32) / product_seconds(DTYPES[precision])


def product_seconds(dtype: torch.dtype) -> float:
    """The best time of a few products of square matrices on the CPU, with torch's threads as they are set."""
    matrix = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype)
    best, started = math.inf, time.perf_counter()
    for _ in range(_PRODUCTS):
        before = time.perf_counter()
        torch.mm(matrix, matrix)
        now = time.perf_counter()
        best = min(best, now - before)
        if now - started > _PRODUCTS_SECONDS:
            break
    return best
