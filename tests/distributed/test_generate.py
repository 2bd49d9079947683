"""Tokens over tensor- and pipeline-parallel ranks are one process's."""

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.generation.batch_engine import BatchEngine
from megalite.generation.json_schema import JSON_OBJECT
from megalite.generation.loaded import load_source
from megalite.generation.request import GREEDY, Sampling
from megalite.generation.source import ModelSource
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.generation import generate_ids, load_model, mixed_requests
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

DRAWN = Sampling(1.5, top_k=40, top_p=0.9, seed=4)
MANY = Sampling(
    1.2, top_p=0.95, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2
)

PAIR = '{"type":"array","items":{"type":"integer","maximum":99},"maxItems":2}'


def tokens(checkpoint: Path, layout: Layout, sampling: Sampling) -> list[int]:
    model = load_model(checkpoint, ParallelMesh.over_world(layout))
    return list(generate_ids(model, [5, 6, 7, 8], new_tokens=20, sampling=sampling))


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=3), Layout(pipeline=2, tensor=2)])
@pytest.mark.parametrize(
    ("shape", "sampling", "scale"),
    [
        (tiny_shape(tied=True), GREEDY, 12.0),
        (tiny_shape(), DRAWN, 5.0),
        (FAMILY_SHAPES["gpt2"], DRAWN, 5.0),
        (FAMILY_SHAPES["phi"], DRAWN, 5.0),
    ],
    ids=["llama, greedy", "llama, drawn", "gpt2, drawn", "phi, drawn"],
)
def test_tokens_are_those_of_one_process(ranks, tmp_path, layout, shape, sampling, scale):
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape, scale=scale))
    [alone] = ranks.run(tokens, world_size=1, checkpoint=checkpoint, layout=Layout(), sampling=sampling)
    assert len(set(alone)) > 3, "a model that repeats itself would hide a broken cache"
    for held in ranks.run(
        tokens, world_size=layout.world_size, checkpoint=checkpoint, layout=layout, sampling=sampling
    ):
        assert held == alone


def served(
    checkpoint: Path, tokenizer: Path, layout: Layout, sampling: Sampling, objects: bool = False
) -> dict[int, str] | None:
    """Rank 0 takes requests that come and go; the others follow it. objects: every second one is of JSON."""
    mesh = ParallelMesh.over_world(layout)
    source = ModelSource(checkpoint, "checkpoint", replace(tiny_shape(), vocab_size=384), tokenizer=tokenizer)
    engine = BatchEngine(load_source(source, mesh), max_requests=4, prefill_chunk=5)
    if mesh.rank != 0:
        engine.serve_steps()
        return None
    texts: dict[int, str] = {}
    requests = [
        replace(
            each,
            sampling=replace(sampling, seed=number),
            logprobs=number % 3 or None,
            json_schema=(JSON_OBJECT, None, PAIR, None)[number % 4] if objects else None,
        )
        for number, each in enumerate(mixed_requests(9, 384))
    ]
    for number, request in enumerate(requests):
        assert engine.submit(request) == number
        if number == 5:
            engine.cancel(3)
        for event in engine.step():
            texts[event.number] = (
                texts.get(event.number, "") + f"{event.token} {event.text!r} {event.finish};"
            )
    while engine.has_work:
        for event in engine.step():
            texts[event.number] = (
                texts.get(event.number, "") + f"{event.token} {event.text!r} {event.finish};"
            )
    engine.close()
    texts.pop(3, None)
    return texts


@pytest.mark.parametrize(
    "layout",
    cases(
        [Layout(pipeline=2, tensor=2), Layout(tensor=4), Layout(pipeline=4)],
        core=[Layout(pipeline=2, tensor=2)],
    ),
)
def test_rank_0_serves_requests_for_all(ranks, tmp_path, layout):
    shape = replace(tiny_shape(), vocab_size=384)
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape))
    arguments = {"checkpoint": checkpoint, "tokenizer": tiny_tokenizer(tmp_path), "sampling": MANY}
    [alone] = ranks.run(served, 1, layout=Layout(), **arguments)
    first, *others = ranks.run(served, layout.world_size, layout=layout, **arguments)
    assert first == alone and len(alone) == 8 and others == [None] * len(others)


def test_json_objects_are_those_of_one_process(ranks, tmp_path):
    pytest.importorskip("llguidance")
    shape = replace(tiny_shape(), vocab_size=384)
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape))
    arguments = {"checkpoint": checkpoint, "tokenizer": tiny_tokenizer(tmp_path), "sampling": MANY}
    [alone] = ranks.run(served, 1, layout=Layout(), objects=True, **arguments)
    first, *_ = ranks.run(served, 4, layout=Layout(pipeline=2, tensor=2), objects=True, **arguments)
    assert first == alone
    for number in alone:
        begin = ("{", None, "[", None)[number % 4]
        if begin is not None:
            assert alone[number].startswith(f"{load_tokenizer(tmp_path).encode(begin)[0]} {begin!r} ")
