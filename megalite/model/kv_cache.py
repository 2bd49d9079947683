"""Keys and values of the tokens of all running requests: a fixed number of slots, one request each.

Running requests stand in slots 0 to n - 1, so that a decode step reads views of the buffers and copies nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megalite.ops.attention_form import AttentionForm
from megalite.ops.decode_attention import compiled_decode_attention, compiled_serves, decode_attention
from megalite.parallel.context_prefill import SegmentShare
from megalite.parallel.host_copies import on_device
from megalite.parallel.lora_bank import Selection
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class CacheSize:
    """The size of a cache. slots: requests at a time; tokens: of each request. Virtual tokens do not count."""

    slots: int
    tokens: int


class KeyValueCache:
    """The buffers of the layers of one pipeline stage, on its device.

    A buffer holds [2, slots, kv heads of this rank, prefix + tokens, head_dim]: keys, then values. Heads come before
    tokens, so that slots and heads are one dimension of batched products, without a copy. Unused places are finite,
    since masked keys are read too. With latent attention a buffer may hold, in place of them, one vector a token:
    [1, slots, 1, tokens, its width], of which the keys and values of all heads are made, the same on all ranks of tp.
    """

    def __init__(
        self,
        size: CacheSize,
        shape: ModelShape,
        layers: Collection[int],
        kv_heads: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """kv_heads: those of this rank; None: the cache is compressed."""
        self.compressed = kv_heads is None
        self.size, self.prefix, self.dtype, self.device = size, shape.prefix_tokens, dtype, device
        rows = self.prefix + size.tokens
        if kv_heads is None:
            assert isinstance(shape, MixtureShape) and shape.latent is not None
            buffer = (1, size.slots, 1, rows, shape.latent.cached_values)
        else:
            buffer = (2, size.slots, kv_heads, rows, shape.head_dim)
        self._layers = {layer: torch.zeros(buffer, dtype=dtype, device=device) for layer in layers}

    def of(self, layer: int) -> Tensor:
        """Return the buffer of a layer."""
        return self._layers[layer]

    def swap(self, slot: int, other: int, tokens: int) -> None:
        """Exchange the first `tokens` tokens of two slots."""
        end = self.prefix + tokens
        for buffer in self._layers.values():
            copied = buffer[:, slot, :, :end].clone()
            buffer[:, slot, :, :end] = buffer[:, other, :, :end]
            buffer[:, other, :, :end] = copied

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of slot `source`, and the virtual tokens before them, to slot `target`."""
        end = self.prefix + tokens
        for buffer in self._layers.values():
            buffer[:, target, :, :end] = buffer[:, source, :, :end]


@dataclass(frozen=True)
class PromptSegment:
    """Consecutive tokens of one prompt that a forward computes.

    slot: where the request stands. start: its tokens in the cache. count: the tokens of the segment. whole: the tokens
    of the whole prompt, by which some rotary embeddings choose their frequencies. share: where context-parallel ranks
    share the tokens; None: this rank computes all.
    """

    slot: int
    start: int
    count: int
    whole: int
    share: SegmentShare | None = None

    @property
    def own(self) -> tuple[range, ...]:
        """The places in the segment of the tokens that this rank computes, ascending."""
        return (range(self.count),) if self.share is None else self.share.own

    @property
    def computed(self) -> int:
        """The number of tokens that this rank computes."""
        return sum(map(len, self.own))


def computed_tokens(decoded: int, segments: Sequence[PromptSegment]) -> list[int]:
    """Return the places of this rank's tokens among those of all ranks: `decoded` ones, then the segments'."""
    places, begin = list(range(decoded)), decoded
    for segment in segments:
        for block in segment.own:
            places.extend(range(begin + block.start, begin + block.stop))
        begin += segment.count
    return places


@dataclass(frozen=True)
class StepTensors:
    """The positions and the ids of the T tokens of a forward, int64 [1, T] each.

    sequence_lengths: the tokens of the sequence that each of them belongs to, without virtual tokens.
    """

    position_ids: Tensor
    sequence_lengths: Tensor
    input_ids: Tensor


@dataclass(frozen=True)
class CachedStep:
    """The tokens [1, T] of one forward on this rank: one for each of the slots 0 to n - 1, then those of the segments
    of prompts.

    lengths: the tokens that slots 0 to n - 1 hold before this forward. adapters: those of the T tokens. ids: the T
    tokens, for `on_device`.
    """

    cache: KeyValueCache
    lengths: tuple[int, ...] = ()
    segments: tuple[PromptSegment, ...] = ()
    adapters: Selection | None = None
    ids: tuple[int, ...] = ()

    def gathered(self, values: Tensor) -> Tensor:
        """Return the values [1, all tokens, ...] of the tokens of all ranks, each once, from those of this rank."""
        if all(segment.share is None for segment in self.segments):
            return values
        counts = [len(self.lengths), *(segment.computed for segment in self.segments)]
        decoded, *parts = values[0].split(counts)
        whole = [
            part if segment.share is None else segment.share.gathered(part)
            for segment, part in zip(self.segments, parts, strict=True)
        ]
        return torch.cat((decoded, *whole)).unsqueeze(0)

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's [1, T, ...] of the values of all tokens that `gathered` returns."""
        return values[:, self._own_places] if values.shape[1] > len(self.position_ids) else values

    @cached_property
    def _own_places(self) -> Tensor:
        places = computed_tokens(len(self.lengths), self.segments)
        return on_device([torch.tensor(places)], self.cache.device)[0]

    @property
    def begins(self) -> bool:
        """True if a segment is the beginning of its prompt, in front of which the virtual tokens stand."""
        return any(each.start == 0 for each in self.segments)

    @cached_property
    def on_device(self) -> "StepTensors":
        """The step's own tensors on the cache's device, for which the host does not wait."""
        lengths = [length + 1 for length in self.lengths]
        for segment in self.segments:
            lengths.extend([max(segment.whole, segment.start + segment.count)] * segment.computed)
        rows = torch.tensor([self.position_ids, lengths, self.ids or [0] * len(lengths)])
        return StepTensors(*on_device([rows], self.cache.device)[0].split(1))

    @property
    def position_ids(self) -> list[int]:
        """The position of each of the T tokens in its sequence."""
        positions = list(self.lengths)
        for segment in self.segments:
            for block in segment.own:
                positions.extend(range(segment.start + block.start, segment.start + block.stop))
        return positions

    @property
    def last_tokens(self) -> list[int]:
        """The place of the last token of every row that is computed here, among the T tokens."""
        counts = accumulate((each.computed for each in self.segments), initial=len(self.lengths))
        return [*range(len(self.lengths)), *(end - 1 for end in list(counts)[1:])]

    @cached_property
    def held(self) -> Tensor:
        """`lengths` as an int64 tensor [n]: the positions of the decoded tokens."""
        return self.on_device.position_ids[0, : len(self.lengths)]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """The slots and the places in them of the decoded tokens: two int64 tensors [n]."""
        device = self.cache.device
        return torch.arange(len(self.lengths), device=device), self.held + self.cache.prefix

    @cached_property
    def _by_window(self) -> "dict[int | None, CachedKeys]":
        return {}

    def attend_decoded(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm
    ) -> Tensor:
        """Append key and value [n, kv heads, head_dim] to slots 0 to n - 1; attend from query [n, heads, head_dim].

        form: its prefix is the cache's.
        """
        buffer = self.cache.of(layer)
        if form.sinks is None and compiled_serves(buffer):
            return compiled_decode_attention(query, key, value, buffer, self.held, form)
        keys, values = self.extend_decoded(layer, key, value, form.window)
        bias = self.visible(form.window).bias
        return decode_attention(query, keys, values, bias, form)

    def extend_decoded(
        self, layer: int, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Append [n, kv heads, head_dim] to slots 0 to n - 1; return the keys and values of `visible`, as views.

        [n, kv heads, end - begin, head_dim] each.
        """
        keys, values = self._extended(layer, (key, value), window)
        return keys, values

    def extend_vectors(self, layer: int, vectors: Tensor, window: int | None) -> Tensor:
        """Append vectors [n, 1, width] to slots 0 to n - 1 of a compressed cache; return those of `visible`, as views.

        [n, 1, end - begin, width].
        """
        return self._extended(layer, (vectors,), window)[0]

    def _extended(self, layer: int, entries: tuple[Tensor, ...], window: int | None) -> Tensor:
        buffer, count = self.cache.of(layer), len(self.lengths)
        alike = min(self.lengths) == max(self.lengths)
        for part, entry in zip(buffer, entries, strict=True):
            if alike:
                part[:count, :, self.cache.prefix + self.lengths[0]] = entry
            else:
                slots, places = self.places
                part[slots, :, places] = entry
        visible = self.visible(window)
        return buffer[:, :count, :, visible.begin : visible.end]

    def extend_vectors_of_segment(self, layer: int, segment: PromptSegment, vectors: Tensor) -> Tensor:
        """Append vectors [S, 1, width] to the segment's slot of a compressed cache; return all of it [1, T, width]."""
        if segment.share is not None:
            vectors = segment.share.gathered(vectors)
        slot, end = self.cache.of(layer)[0, segment.slot], segment.start + segment.count
        slot[:, segment.start : end] = vectors.transpose(0, 1)
        return slot[:, :end]

    def extend_segment(
        self, layer: int, segment: PromptSegment, key: Tensor, value: Tensor, prefix: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Append [S, kv heads, head_dim] to the segment's slot; return all its keys and values, as views.

        key, value: of this rank's tokens; those of the other ranks are gathered.
        prefix: keys and values of the virtual tokens [prefix, 2, kv heads, head_dim], for the beginning of a prompt.
        Returns [1, T, kv heads, head_dim] each, virtual tokens included.
        """
        slot = self.cache.of(layer)[:, segment.slot]
        if segment.share is not None:
            key, value = segment.share.gathered(torch.cat((key, value), dim=1)).chunk(2, dim=1)
        if prefix is not None and segment.start == 0:
            slot[:, :, : self.cache.prefix] = prefix.permute(1, 2, 0, 3)
        begin = self.cache.prefix + segment.start
        end = begin + segment.count
        slot[0, :, begin:end], slot[1, :, begin:end] = key.transpose(0, 1), value.transpose(0, 1)
        keys, values = slot[:, None, :, :end].transpose(2, 3)
        return keys, values

    def visible(self, window: int | None) -> "CachedKeys":
        """Return the keys that the decoded tokens see in a layer with this window, its own included."""
        if window not in self._by_window:
            self._by_window[window] = self._visible(window)
        return self._by_window[window]

    def _visible(self, window: int | None) -> "CachedKeys":
        prefix, lengths = self.cache.prefix, self.lengths
        end = prefix + max(lengths) + 1
        cut = window is not None and window < end - prefix
        # A prefix in front of a window is seen by every token, so that all keys between them are read and hidden.
        begin = prefix + max(0, min(lengths) + 1 - window) if window is not None and not prefix else 0
        if min(lengths) == max(lengths) and not (cut and prefix):
            return CachedKeys(begin, end, None)
        key = torch.arange(begin, end, device=self.cache.device)
        own = self.places[1].unsqueeze(1)
        hidden = key > own
        if window is not None:
            hidden |= (key <= own - window) & (key >= prefix)
        bias = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.cache.device)
        return CachedKeys(begin, end, bias.masked_fill_(hidden, float("-inf"))[:, None, None])


@dataclass(frozen=True)
class CachedKeys:
    """The keys [begin, end) of all slots that a decode step reads.

    bias: [n, 1, 1, end - begin], added to the scores: 0, or -inf for a key that is not seen; None: all are seen.
    """

    begin: int
    end: int
    bias: Tensor | None
