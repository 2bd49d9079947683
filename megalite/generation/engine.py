"""Generation from a checkpoint of any layout, over tensor- and pipeline-parallel ranks, with cached keys and values."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.config.shape_settings import longest_sequence_setting
from megalite.errors import ConfigError, Problem
from megalite.generation.request import GREEDY, Sampling
from megalite.generation.sampling import next_token
from megalite.model.kv_cache import KeyValueCache
from megalite.model.options import PLAIN
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.model.transformer import Chunk
from megalite.parallel.decode import along_chunks, from_last_chunk
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split


def build_model(shape: ModelShape, mesh: ParallelMesh, dtype: torch.dtype = torch.float32) -> Replica:
    """Return this rank's part of a model without weights, ready to be loaded and to generate."""
    split = pipeline_split(shape.num_hidden_layers, mesh.pp.size)
    replica = build_replica(shape, mesh, split, replace(PLAIN, dtype=dtype), seed=None)
    replica.stage.eval()
    return replica


def load_model(
    checkpoint: Path, mesh: ParallelMesh | None = None, dtype: torch.dtype = torch.float32
) -> Replica:
    """Return this rank's part of a checkpoint's model; raises CheckpointError for a damaged one. Collective."""
    replica = build_model(read_manifest(checkpoint).model, mesh or ParallelMesh.single(), dtype)
    load_checkpoint(checkpoint, replica)
    return replica


def generate_ids(
    model: Replica,
    prompt_ids: Sequence[int],
    *,
    new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """The next id, `new_tokens` times, each as soon as it is known; one of `stop_ids` is the last.

    Every rank of the model's mesh must iterate, and gets the same ids. Raises ConfigError when the prompt is empty,
    has an id outside of the vocabulary, or does not fit the model's positions.
    """
    shape = model.shape
    capacity = len(prompt_ids) + new_tokens
    if not prompt_ids:
        raise ConfigError([Problem("prompt", "is empty", "give at least one character")], "the request")
    if not all(0 <= each < shape.vocab_size for each in prompt_ids):
        problem = Problem(
            "prompt",
            f"has id {max(prompt_ids)}, and the model's vocabulary {shape.vocab_size} ids",
            "name the tokenizer that the model was trained with",
        )
        raise ConfigError([problem], "the request")
    if capacity > shape.longest_sequence:
        problem = Problem(
            "tokens",
            f"{len(prompt_ids)} tokens of the prompt and {new_tokens} new ones exceed"
            f" {longest_sequence_setting(shape)} = {shape.longest_sequence}",
            f"use at most {max(0, shape.longest_sequence - len(prompt_ids))}, or a shorter prompt",
        )
        raise ConfigError([problem], "the request")
    return _generate(model, list(prompt_ids), new_tokens, sampling, stop_ids, KeyValueCache(capacity))


@torch.inference_mode()
def _generate(
    model: Replica,
    ids: list[int],
    new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int],
    cache: KeyValueCache,
) -> Iterator[int]:
    for _ in range(new_tokens):
        logits = _last_logits(model, ids, cache)
        cache.advance(len(ids))
        chosen = 0 if logits is None else next_token(logits, sampling, cache.length)
        chosen = from_last_chunk(chosen, model.split, model.mesh)
        yield chosen
        if chosen in stop_ids:
            return
        ids = [chosen]


def _last_logits(model: Replica, ids: list[int], cache: KeyValueCache) -> Tensor | None:
    """Logits [V] after the last of the new ids, on the stage that has the head; None on the others."""
    mesh, shape = model.mesh, model.shape
    input_ids = torch.tensor([ids], device=mesh.device)
    position_ids = torch.arange(cache.length, cache.length + len(ids), device=mesh.device).unsqueeze(0)

    def run(chunk: nn.Module, hidden_states: Tensor | None) -> Tensor:
        inputs = input_ids if hidden_states is None else hidden_states
        return cast(Chunk, chunk).decode(inputs, position_ids, cache=cache)

    between = torch.empty(1, len(ids), shape.hidden_size, dtype=model.stage.dtype, device=mesh.device)
    hidden_states = along_chunks(model.stage.chunks, model.split, mesh, run, between)
    if hidden_states is None:
        return None
    # Only the last position predicts something new.
    return model.stage.chunks[-1].logits(hidden_states[:, -1:])[0, -1]
