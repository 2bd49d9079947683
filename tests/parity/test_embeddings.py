"""Embeddings beside requests that generate, also over tensor- and pipeline-parallel ranks, against transformers."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megalite.convert.huggingface.export import export
from megalite.generation import token_engine
from megalite.generation.request import Request
from megalite.generation.token_engine import TokenEngine
from megalite.model.kv_cache import CacheSize
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.generation import LONGEST, load_model, mixed_requests
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES
from tests.unit.convert.exporting import lively_stage, save_stage

FAMILIES = ("llama 3", "gemma2", "gpt2")


@dataclass(frozen=True)
class Known:
    """A checkpoint, requests, and transformers' embedding of each of them that embeds."""

    checkpoint: Path
    requests: list[Request]
    embeddings: dict[int, list[float]]


@pytest.fixture(scope="module", params=cases(FAMILIES, core=FAMILIES[:1]))
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    shape, folder = FAMILY_SHAPES[request.param], tmp_path_factory.mktemp("model")
    checkpoint = save_stage(folder, shape, lively_stage(shape, scale=5.0))
    export(checkpoint, folder / "export", None)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "export").base_model
    requests = [
        replace(each, max_tokens=0, embeds=True) if number % 3 else replace(each, logprobs=2)
        for number, each in enumerate(mixed_requests(12, shape.vocab_size))
    ]
    embeddings = {}
    for number, each in enumerate(requests):
        if each.embeds:
            with torch.no_grad():
                last = theirs(torch.tensor([each.prompt_ids])).last_hidden_state[0, -1]
            embeddings[number] = (last / last.norm()).tolist()
    return Known(checkpoint, requests, embeddings)


def found(
    checkpoint: Path, layout: Layout, requests: list[Request], slots: int, chunk: int
) -> tuple[dict[int, tuple[float, ...]], dict[int, list[int]]]:
    """Return the embeddings and the tokens of the requests, by their numbers."""
    model = load_model(checkpoint, ParallelMesh.over_world(layout) if layout.world_size > 1 else None)
    engine = TokenEngine(model, CacheSize(slots, LONGEST), prefill_chunk=chunk)
    for number, request in enumerate(requests):
        engine.submit(number, request)
    embeddings: dict[int, tuple[float, ...]] = {}
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for sampled in engine.step():
            if sampled.embedding is None:
                tokens.setdefault(sampled.number, []).append(sampled.token)
            else:
                assert sampled.number not in embeddings and sampled.finish == "stop"
                embeddings[sampled.number] = sampled.embedding
    return embeddings, tokens


def assert_right(known: Known, embeddings: dict[int, tuple[float, ...]]) -> None:
    assert embeddings.keys() == known.embeddings.keys()
    for number, expected in known.embeddings.items():
        assert_close(embeddings[number], expected, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize(("slots", "chunk"), [(1, 512), (5, 7), (16, 512)])
def test_embeddings_are_transformers_hidden_states(known: Known, slots: int, chunk: int) -> None:
    embeddings, tokens = found(known.checkpoint, Layout(), known.requests, slots, chunk)
    assert_right(known, embeddings)
    generating = {number: each for number, each in enumerate(known.requests) if not each.embeds}
    _, alone = found(known.checkpoint, Layout(), list(generating.values()), slots, chunk)
    assert tokens == dict(zip(generating, alone.values(), strict=True))


def test_embeddings_over_ranks_are_transformers_hidden_states(ranks, known: Known) -> None:
    arguments = {"checkpoint": known.checkpoint, "requests": known.requests, "slots": 6, "chunk": 9}
    for embeddings, _ in ranks.run(found, 4, layout=Layout(pipeline=2, tensor=2), **arguments):
        assert_right(known, embeddings)


def test_the_hidden_state_of_another_request_is_noticed(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = token_engine.with_embeddings
    monkeypatch.setattr(
        token_engine, "with_embeddings", lambda values, hidden, rows: embed(values, hidden.roll(1, 0), rows)
    )
    embeddings, _ = found(known.checkpoint, Layout(), known.requests, 16, 512)
    with pytest.raises(AssertionError):
        assert_right(known, embeddings)
