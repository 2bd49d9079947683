"""The message of a command that runs a model, when an accelerator has no memory left for it. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.config.output.summary import memory_text
from megalite.generation.layout_and_memory import cache_bytes, weight_bytes, wider_experts
from megalite.generation.source import ModelSource
from megalite.topology.axes import Layout
from megalite.topology.dtypes import FLOATS
from megalite.topology.sharding import tensor_sizes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class InferenceMemory:
    """The memory of a command on its accelerators: a model, and keys and values of its requests.

    dtype: torch's name of the type that was asked for. requests, tokens: flag and value: requests at a time, and tokens
    of each. cached: whether the keys and values of all of them are kept. settable: how many of `tokens` its flag sets:
    the others are the prompt's; None: all of them.
    """

    source: ModelSource
    layout: Layout
    dtype: str | None
    requests: tuple[str, int]
    tokens: tuple[str, int]
    cached: bool = True
    settable: int | None = None

    def lines(self, device: "torch.device") -> list[str]:
        """Return the lines for `exhausted_memory_explained`: the kinds of memory, and the flags that lower them."""
        import torch

        from megalite.generation.inference_dtype import inference_dtype

        asked = None if self.dtype is None else getattr(torch, self.dtype)
        dtype = str(inference_dtype(self.source, device, asked)).removeprefix("torch.")
        return [
            self._kinds(dtype),
            f"to lower it: {', or '.join(self._remedies(dtype)) or 'use a smaller model'}",
        ]

    def _kinds(self, dtype: str) -> str:
        layout = self.layout
        in_type = "int8" if self.source.int8 else dtype
        weights = weight_bytes(self.source, dtype, layout)
        ranks = layout.world_size // layout.copies
        kinds = f"weights {memory_text(weights / ranks)} in {in_type}"
        if self.cached:
            count, length = self.requests[1], self.tokens[1]
            cache = memory_text(count * length * cache_bytes(self.source, dtype, layout.tensor) / ranks)
            kinds += f", keys and values of {count:,} x {length:,} tokens {cache}"
        return f"this rank needs by estimate: {kinds}, and activations"

    def _remedies(self, dtype: str) -> Iterator[str]:
        (flag, count), (of_tokens, length) = self.requests, self.tokens
        if count > 1:
            yield f"{flag} {count // 2}"
        settable = length if self.settable is None else self.settable
        if settable > max(1, length // 2):
            yield f"{of_tokens} {settable // 2}"
        elif length > settable > 0:
            yield "a shorter prompt"
        shape = self.source.shape
        wider = [
            size
            for size in tensor_sizes(shape.num_attention_heads, shape.num_key_value_heads)
            if size > self.layout.tensor
            and (self.layout.expert == 1 or size * self.layout.context % self.layout.expert == 0)
        ]
        if wider:
            yield f"--tensor {wider[0]}"
        for size in wider_experts(self.layout, shape):
            yield f"--expert {size}"
        if not self.source.int8:
            if FLOATS[dtype].size_bytes > 2:
                yield "--dtype bfloat16"
            yield "an int8 export (megalite convert export --quantise int8)"
