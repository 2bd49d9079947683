"""Place parameters in the flat buffers of Megatron-LM's distributed optimizer. No torch.

Source: _ParamAndGradBuffer of megatron/core/distributed/param_and_grad_buffer.py. A buffer takes a model chunk's
parameters from the last to the first, each at a multiple of 64 elements, and is cut into buckets. A bucket's unpadded
size ends with its last parameter, or with the alignment before a parameter that has a bucket of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_ALIGNMENT = 64


@dataclass(frozen=True)
class BufferedParameter:
    """A parameter of one rank's model chunk. own_bucket: an embedding shared by the first and the last stage."""

    name: str
    numel: int
    own_bucket: bool = False


@dataclass(frozen=True)
class BucketRange:
    """The first element of a parameter within its bucket."""

    bucket: int
    start: int


def bucket_sizes(parameters: Sequence[BufferedParameter], smallest: int | None) -> list[int]:
    """Return the unpadded size of each bucket. smallest: elements that close a bucket; None: they are never enough."""
    sizes: list[int] = []
    end = 0
    for parameter in reversed(parameters):
        start = _aligned(end)
        if parameter.own_bucket and end:
            sizes.append(start)
            start = 0
        end = start + parameter.numel
        if parameter.own_bucket or (smallest is not None and end >= smallest):
            sizes.append(end)
            end = 0
    return sizes + ([end] if end else [])


def fill_buckets(
    parameters: Sequence[BufferedParameter], sizes: Sequence[int]
) -> dict[str, BucketRange] | None:
    """Return the place of each parameter in buckets of these unpadded sizes; None if they do not fill them exactly."""
    places: dict[str, BucketRange] = {}
    bucket = end = 0
    for parameter in reversed(parameters):
        start = _aligned(end)
        if parameter.own_bucket and end:
            if sizes[bucket] != start:
                return None
            bucket, start = bucket + 1, 0
        end = start + parameter.numel
        if bucket >= len(sizes) or end > sizes[bucket] or (parameter.own_bucket and end < sizes[bucket]):
            return None
        places[parameter.name] = BucketRange(bucket, start)
        if end == sizes[bucket]:
            bucket, end = bucket + 1, 0
    return places if bucket == len(sizes) and not end else None


# A layer's parameters in the order of its modules; Transformer Engine's linears hold the norm before them.
_MODULES = {
    "local": (
        *(
            "input_layernorm",
            "self_attn.o_proj",
            "self_attn.qkv_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
        ),
        *("post_attention_layernorm", "mlp.gate_up_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
    "transformer_engine": (
        *(
            "self_attn.o_proj",
            "input_layernorm",
            "self_attn.qkv_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
        ),
        *("post_attention_layernorm", "mlp.gate_up_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
}


def in_module_order(names: Iterable[str], layers: Iterable[int], implementation: str) -> Iterator[str]:
    """Yield the registered parameters of `layers`, as megatron-core's modules have them.

    names: those of the model. implementation: Megatron-LM's --transformer-impl.
    """
    known = set(names)
    for layer in layers:
        for module in _MODULES[implementation]:
            for kind in ("weight", "bias"):
                if (name := f"model.layers.{layer}.{module}.{kind}") in known:
                    yield name


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
