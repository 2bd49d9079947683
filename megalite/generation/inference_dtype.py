"""The number type in which a model is loaded to generate, serve or evaluate. This file alone chooses it."""

from collections import Counter
from collections.abc import Iterator
from math import prod

import torch

from megalite.checkpoint.folder import read_manifest
from megalite.convert.huggingface.files import headers
from megalite.convert.weight_source import WeightSource
from megalite.generation.layout_and_memory import CPU_DTYPE
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.dtypes import NUMBER_TYPES
from megalite.topology.state import WEIGHT

_LOW_PRECISION = ("bfloat16", "float16")
_NAMES = {kind.code: kind.name for kind in NUMBER_TYPES if kind.precision}


def inference_dtype(
    source: WeightSource, device: torch.device, asked: torch.dtype | None = None
) -> torch.dtype:
    """Return the number type of weights and computation: `asked`, unless the user named none.

    On a CPU the default is float32: a product in low precision is slower there, and numbers do not depend on the
    checkpoint. On an accelerator it is the weights' own type if that is bfloat16 or float16, else bfloat16: float32
    takes twice the memory and time of a decode step, and has no tensor cores in prefill. A card without instructions
    for bfloat16 computes in float32 instead, or in float16 where the weights are float16.
    """
    if asked is not None:
        return asked
    if device.type == "cpu":
        return getattr(torch, CPU_DTYPE)
    stored = stored_dtype(source)
    chosen = stored if stored in _LOW_PRECISION else "bfloat16"
    if chosen == "bfloat16" and not torch.get_device_module(device).is_bf16_supported(
        including_emulation=False
    ):
        chosen = "float32"
    return getattr(torch, chosen)


def agreed_dtype(
    source: WeightSource, mesh: ParallelMesh, asked: torch.dtype | None = None
) -> tuple[torch.dtype, str]:
    """Return the number type, the same on all ranks, and why if the ranks' own ones differ, else ""; collective.

    One job may have cards with and without bfloat16, and a collective between two types never ends. All cards compute
    in float32.
    """
    if asked is not None:
        return asked, ""
    gathered = mesh.gather_objects(inference_dtype(source, mesh.device))
    own = mesh.broadcast_object(None if gathered is None else [*dict.fromkeys(gathered)])
    if len(own) == 1:
        return own[0], ""
    return torch.float32, f"the ranks alone would take {' and '.join(map(_name, own))}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_dtype(source: WeightSource) -> str:
    """Return torch's name of the type that most weights on disk have; beside an adapter, that of its base.

    int8 linears count by what is stored beside them. Raises CheckpointError if a file cannot be read.
    """
    elements: Counter[str] = Counter()
    if source.base is None and source.format == "checkpoint":
        for tensor in read_manifest(source.folder).tensors[WEIGHT].values():
            elements[tensor.dtype] += prod(tensor.shape)
    else:
        for header in headers(source.base or source.folder).values():
            for entry in header.values():
                elements[_NAMES.get(entry.dtype, "")] += prod(entry.shape)
        del elements[""]  # int8 weights, and tables of integers
    return max(elements, key=lambda name: elements[name], default=CPU_DTYPE)


def inference_notes(
    source: WeightSource, device: torch.device, dtype: torch.dtype, *, chosen: bool, why: str = ""
) -> Iterator[str]:
    """Yield what a user of an accelerator should know before a model is loaded.

    chosen: they named no type. why: that of `agreed_dtype`.
    """
    if device.type == "cpu":
        return
    if chosen:
        facts = "; ".join(filter(None, [f"weights: {stored_dtype(source)}", why]))
        yield f"note: {source.folder} runs in {_name(dtype)} on {device} ({facts}); --dtype names another type"
    if source.int8:
        yield (
            f"warning: {source.folder} has int8 weights, which are dequantised for each product: on an accelerator "
            "they save memory and cost time; weights in 16 bits are faster where they fit"
        )
