"""Token ids from a model of any layout: `generate_ids`, and how a model is built for it."""

from collections.abc import Collection, Iterator, Sequence

import torch

from megalite.generation.request import GREEDY, Request, Sampling, check_request
from megalite.generation.token_engine import PREFILL_CHUNK, TokenEngine
from megalite.model.kv_cache import Room
from megalite.model.options import ModelOptions
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest.decide import choose_kernels
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split


def build_model(
    shape: ModelShape, mesh: ParallelMesh, dtype: torch.dtype = torch.float32, *, int8: bool = False
) -> Replica:
    """Return this rank's part of a model without weights, ready to be loaded and to generate.

    int8: with linears of int8 weights.
    """
    split = pipeline_split(shape.num_hidden_layers, mesh.pp.size)
    # Without the self-test of a card: there torch computes.
    operators = choose_kernels("auto", mesh.device.type).operators
    options = ModelOptions(dtype=dtype, operators=operators)
    return build_replica(shape, mesh, split, options, seed=None, int8=int8)


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
        model, Room(1, len(request.prompt_ids) + request.max_tokens), prefill_chunk=prefill_chunk
    )
    engine.submit(0, request)
    while engine.has_work:
        for sampled in engine.step():
            yield sampled.token
