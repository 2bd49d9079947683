"""Greedy generation in one process, from a checkpoint of any layout, with cached keys and values."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.errors import ConfigError, Problem
from megalite.model.kv_cache import KeyValueCache
from megalite.model.stages import build_stage
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.layout import pipeline_split


def load_model(checkpoint: Path) -> Stage:
    """The whole model of a checkpoint in float32, on the CPU; raises CheckpointError for a damaged one."""
    shape, mesh = read_manifest(checkpoint).model, ParallelMesh.single()
    split = pipeline_split(shape.num_hidden_layers)
    stage = build_stage(shape, mesh, split, seed=None)
    load_checkpoint(checkpoint, mesh=mesh, shape=shape, split=split, stage=stage)
    return stage.eval()


def generate_greedily(
    stage: Stage, prompt_ids: Sequence[int], *, new_tokens: int, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """The most likely next id, `new_tokens` times, each as soon as it is known; one of `stop_ids` is the last.

    stage: the whole model. Raises ConfigError when the prompt is empty or does not fit the model's positions.
    """
    capacity = len(prompt_ids) + new_tokens
    positions = stage.shape.max_position_embeddings
    if not prompt_ids:
        raise ConfigError([Problem("--prompt", "is empty", "give at least one character")], "the request")
    if capacity > positions:
        problem = Problem(
            "--tokens",
            f"{len(prompt_ids)} tokens of the prompt and {new_tokens} new ones exceed"
            f" model.max_position_embeddings = {positions}",
            f"use at most {max(0, positions - len(prompt_ids))}, or a shorter prompt",
        )
        raise ConfigError([problem], "the request")
    return _generate(stage, list(prompt_ids), new_tokens, stop_ids, KeyValueCache(capacity))


@torch.inference_mode()
def _generate(
    stage: Stage, ids: list[int], new_tokens: int, stop_ids: Collection[int], cache: KeyValueCache
) -> Iterator[int]:
    for _ in range(new_tokens):
        input_ids = torch.tensor([ids])
        position_ids = torch.arange(cache.length, cache.length + len(ids)).unsqueeze(0)
        hidden_states = stage.whole.decode(input_ids, position_ids, cache=cache)
        cache.advance(len(ids))
        # Only the last position predicts something new.
        chosen = int(stage.whole.logits(hidden_states[:, -1:])[0, -1].argmax())
        yield chosen
        if chosen in stop_ids:
            return
        ids = [chosen]
