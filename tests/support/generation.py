"""Requests and engines for tests of generation."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.weights import fill
from megalite.convert.weight_source import WeightSource
from megalite.convert.weights import open_weights
from megalite.generation.loaded import build_model
from megalite.generation.request import GREEDY, Request, Sampling, check_request
from megalite.generation.token_engine import PREFILL_CHUNK, TokenEngine
from megalite.model.kv_cache import CachedStep, CacheSize, KeyValueCache, PromptSegment
from megalite.model.replica import Replica
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout

# Tokens of a prompt and its new tokens.
LONGEST = 48


def prompt_step(cache: KeyValueCache, start: int, count: int) -> CachedStep:
    """Return a step of `count` tokens in slot 0, which holds `start` tokens."""
    return CachedStep(cache, segments=(PromptSegment(0, start, count, start + count),))


def one_slot(stage: Stage, tokens: int) -> KeyValueCache:
    """Return a cache of one request of up to `tokens` tokens, for a stage that holds the whole model."""
    weight = next(stage.parameters())
    layers = range(stage.shape.num_hidden_layers)
    heads = stage.shape.num_key_value_heads
    return KeyValueCache(CacheSize(1, tokens), stage.shape, layers, heads, stage.dtype, weight.device)


def load_model(
    checkpoint: Path, mesh: ParallelMesh | None = None, dtype: torch.dtype = torch.float32
) -> Replica:
    """Return this rank's part of a checkpoint's model. Collective."""
    source = WeightSource(checkpoint, "checkpoint", read_manifest(checkpoint).model)
    replica = build_model(source.shape, mesh or ParallelMesh.single(), dtype)
    fill(replica, open_weights(source), checkpoint)
    return replica


def generate_ids(
    model: Replica,
    prompt_ids: Sequence[int],
    *,
    new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_ids: Collection[int] = (),
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[int]:
    """The next id, `new_tokens` times, each as soon as it is known; one of `stop_ids` is the last.

    Every rank of the model's mesh must iterate, and gets the same ids. prefill_chunk: the most tokens of the prompt in
    one forward. Raises ConfigError when the prompt is empty, has an id outside of the vocabulary, or does not fit the
    model's positions.
    """
    request = Request(tuple(prompt_ids), new_tokens, sampling, frozenset(stop_ids))
    check_request(request, model.shape, model.shape.longest_sequence)
    return _generate(model, request, prefill_chunk)


def _generate(model: Replica, request: Request, prefill_chunk: int) -> Iterator[int]:
    engine = TokenEngine(
        model, CacheSize(1, len(request.prompt_ids) + request.max_tokens), prefill_chunk=prefill_chunk
    )
    engine.submit(0, request)
    while engine.has_work:
        for sampled in engine.step():
            yield sampled.token


def mixed_requests(
    count: int, vocabulary: int, *, sampling: Sampling = GREEDY, logprobs: int | None = None, seed: int = 0
) -> list[Request]:
    """Return requests of prompts of 1 to 33 tokens and 2 to 15 new ones; every third begins as the one before it."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Request] = []
    for number in range(count):
        length = 1 + 13 * number % 33
        prompt = torch.randint(vocabulary, (length,), generator=generator).tolist()
        if number % 3 == 2:
            prompt = (list(found[-1].prompt_ids) + prompt)[:33]
        found.append(Request(tuple(prompt), 2 + 5 * number % 14, sampling, frozenset(), logprobs=logprobs))
    return found


def run_requests(
    model: Replica,
    requests: Sequence[Request],
    *,
    slots: int,
    chunk: int = 512,
    joining: int = 0,
) -> dict[int, list[int]]:
    """Return the new tokens of all requests, by number; joining: how many join later, one after each third step."""
    engine = TokenEngine(model, CacheSize(slots, LONGEST), prefill_chunk=chunk)
    first = len(requests) - joining
    for number, request in enumerate(requests[:first]):
        engine.submit(number, request)
    found, steps, late = defaultdict(list), 0, list(enumerate(requests))[first:]
    while engine.has_work or late:
        if late and (steps % 3 == 2 or not engine.has_work):
            engine.submit(*late.pop(0))
        for sampled in engine.step():
            found[sampled.number].append(sampled.token)
        steps += 1
    return dict(found)


def tokens_on_rank(
    checkpoint: Path, layout: Layout, requests: Sequence[Request], how: Mapping[str, int], dtype: str
) -> dict[int, list[int]]:
    """Run requests with a checkpoint's model; for the pool of ranks."""
    model = load_model(checkpoint, ParallelMesh.over_world(layout), getattr(torch, dtype))
    return run_requests(model, requests, **how)
