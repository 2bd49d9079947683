"""The number type of weights and activations, and what "auto" makes of it on this machine."""

from dataclasses import dataclass
from typing import Any

import torch

from megalite.topology.dtypes import PRECISIONS

DTYPES: dict[str, torch.dtype] = {word: getattr(torch, kind.name) for word, kind in PRECISIONS.items()}
# The instructions that multiply matrices in a low precision, by torch's names; without them torch converts to fp32.
_INSTRUCTIONS = {"bf16": ("amx_bf16", "avx512_bf16"), "fp16": ("amx_fp16", "avx512_fp16")}


@dataclass(frozen=True)
class Precision:
    """A number type by its name in DTYPES, and what the user should know of the choice; empty: nothing."""

    name: str
    note: str = ""
    warning: str = ""


def choose_precision(asked: str, device: torch.device, resumed: Any = None) -> Precision:
    """Return the number type that `training.precision` = `asked` stands for on this machine.

    It depends on the processor's instructions or the device's capability alone, never on a measurement: the same
    command trains in the same precision on a busy machine too.

    resumed: the precision of the run that is resumed, None for a new run; "auto" keeps it, so that no loss curve
    changes with the machine.
    """
    if asked == "auto" and resumed in DTYPES:
        return Precision(resumed, f'training.precision: "auto" stays "{resumed}", as the run began')
    if device.type != "cpu":
        capable = torch.get_device_module(device).is_bf16_supported(including_emulation=False)
        return Precision(("bf16" if capable else "fp32") if asked == "auto" else asked)
    if asked == "auto":
        instructions = _instructions("bf16")
        if not instructions:
            return Precision("fp32")
        return Precision("bf16", f'training.precision: "auto" is "bf16": the processor has {instructions[0]}')
    if asked in _INSTRUCTIONS and not _instructions(asked):
        needed = " or ".join(_INSTRUCTIONS[asked])
        cost = f'"{asked}" is slower than "fp32" on a processor without {needed}'
        return Precision(asked, warning=f'training.precision: {cost}; "fp32" or "auto" trains faster')
    return Precision(asked)


tf32_let_on: set[str] = set()
"""Device types whose TF32 a run of this process has let."""


def set_tf32(device: torch.device, tf32: bool) -> None:
    """Let this process compute fp32 matrix products of a CUDA device in TF32; False takes back what an earlier run let.

    Else the user's own choice stays, as an image's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE.
    """
    if device.type == "cuda" and (tf32 or device.type in tf32_let_on):
        # Sets torch's new switch too; the new one alone makes the old one's getters raise, which inductor calls.
        torch.backends.cuda.matmul.allow_tf32 = tf32
        tf32_let_on.add(device.type)


def _instructions(precision: str) -> list[str]:
    """Return which of the instructions for `precision` this processor has, the fastest first."""
    capabilities = torch.cpu.get_capabilities()
    return [each for each in _INSTRUCTIONS[precision] if capabilities.get(each, False)]
