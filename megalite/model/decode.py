"""A model of any layout without a schedule and without gradients: for generation and evaluation."""

from typing import cast

import torch
from torch import Tensor, nn

from megalite.launcher.control.progress import Activity, progress
from megalite.model.context import EMPTY_CONTEXT, StepContext
from megalite.model.kv_cache import CacheSize, KeyValueCache
from megalite.model.latent_attention import LatentSelfAttention
from megalite.model.layer import DecoderLayer
from megalite.model.replica import Replica
from megalite.model.transformer import Chunk
from megalite.parallel.decode import Sends, along_chunks


def last_hidden_states(
    model: Replica,
    input_ids: Tensor,
    position_ids: Tensor,
    *,
    context: StepContext = EMPTY_CONTEXT,
    sends: Sends | None = None,
    lengths: Tensor | None = None,
) -> Tensor | None:
    """Return the hidden states [B, S, H] of input_ids [B, S] on the stage with the head; None on the others.

    context, lengths, sends: as of `Chunk.decode` and `along_chunks`. Collective over the ranks of one copy of the
    model.
    """

    progress.begin(Activity.INFERENCE)

    def run(chunk: nn.Module, hidden_states: Tensor | None) -> Tensor:
        inputs = input_ids if hidden_states is None else hidden_states
        return cast(Chunk, chunk).decode(inputs, position_ids, context, lengths)

    # A stage takes shape and type from it, and nothing else.
    between = torch.empty((), dtype=model.stage.dtype, device=model.mesh.device)
    between = between.expand(*input_ids.shape, model.shape.hidden_size)
    return along_chunks(model.stage.chunks, model.split, model.mesh, run, between, sends)


def empty_cache(model: Replica, size: CacheSize) -> KeyValueCache:
    """Return a cache for the layers and heads of this rank; of latent attention compressed where it can be."""
    layers = {int(name): cast(DecoderLayer, layer) for name, layer in model.stage.model.layers.items()}
    attentions = [layer.self_attn for layer in layers.values()]
    compressed = all(isinstance(each, LatentSelfAttention) and each.compresses for each in attentions)
    heads = None if attentions and compressed else model.mesh.local_heads(model.shape.num_key_value_heads)
    return KeyValueCache(size, model.shape, layers, heads, model.stage.dtype, model.mesh.device)
