"""Caches of one slot, and requests, for tests of generation."""

from megalite.model.kv_cache import KeyValueCache, Room
from megalite.model.transformer import Stage


def one_slot(stage: Stage, tokens: int) -> KeyValueCache:
    """Return a cache of one request of up to `tokens` tokens, for a stage that holds the whole model."""
    weight = next(stage.parameters())
    layers = range(stage.shape.num_hidden_layers)
    heads = stage.shape.num_key_value_heads
    return KeyValueCache(Room(1, tokens), stage.shape, layers, heads, stage.dtype, weight.device)
