"""Constrained decoding: every whole text is a JSON object, the same alone, in a batch and with stages."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.data.tokenizer import load_tokenizer
from megalite.errors import ConfigError
from megalite.generation import json_object
from megalite.generation.batch_engine import BatchEngine
from megalite.generation.loaded import LoadedModel, load
from megalite.generation.prompts import prompt_ids
from megalite.generation.request import Request, Sampling
from megalite.generation.source import ModelSource
from megalite.model.replica import Replica
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    shape = replace(
        tiny_shape(layers=2), vocab_size=390, max_position_embeddings=256
    )  # 6 ids without a token
    file = tiny_tokenizer(folder)
    stage = lively_stage(shape, scale=3.0).eval()
    return LoadedModel(Replica.whole(stage), load_tokenizer(file), ModelSource(folder, False, shape, file))


def wanted(loaded: LoadedModel, seed: int, **settings: object) -> Request:
    tokenizer = loaded.tokenizer
    prompt = tuple(tokenizer.encode("one rank " * (1 + seed % 5)))
    request = Request(prompt, 120, Sampling(), frozenset({tokenizer.end_of_document_id}), json_object=True)
    drawn = Sampling(1.0, seed=seed, top_k=(0, 5)[seed % 2], top_p=(1.0, 0.9)[seed % 3 == 0])
    return replace(request, sampling=Sampling(repetition_penalty=1.3) if seed % 4 == 0 else drawn, **settings)


def texts(loaded: LoadedModel, requests: list[Request], most: int) -> list[tuple[str, str | None, int]]:
    """Return (text, finish, tokens) of each request."""
    engine = BatchEngine(loaded, max_requests=most)
    numbers = [engine.submit(each) for each in requests]
    found: dict[int, tuple[str, str | None, int]] = {number: ("", None, 0) for number in numbers}
    while engine.has_work:
        for event in engine.step():
            text, _, tokens = found[event.number]
            found[event.number] = (text + event.text, event.finish, tokens + 1)
    return [found[number] for number in numbers]


def test_whole_texts_are_json_objects_alone_and_in_a_batch(loaded: LoadedModel) -> None:
    requests = [wanted(loaded, seed) for seed in range(24)]
    free = [replace(each, json_object=False) for each in requests]
    mixed = texts(loaded, [each for pair in zip(requests, free, strict=True) for each in pair], 7)
    found = mixed[::2]
    whole = [text for text, finish, _ in found if finish == "stop"]
    assert len(whole) > 4 and all(isinstance(json.loads(text), dict) for text in whole)
    assert all(text.startswith("{") for text, _, _ in found)
    assert all(tokens == 120 for _, finish, tokens in found if finish == "length")
    for at in range(0, 24, 5):
        assert texts(loaded, [requests[at]], 1) == [found[at]]
        assert texts(loaded, [free[at]], 1) == [mixed[1::2][at]], "a constraint reached another request"


def test_the_end_of_the_object_ends_the_text_and_nothing_before_it(loaded: LoadedModel) -> None:
    # All tokens of a text end it, as far as the request says; the object has none of them.
    ordinary = frozenset(loaded.tokenizer.encode(" the gradient a"))
    for seed in (1, 2, 3):
        for stop_ids in (frozenset(), ordinary):
            [(text, finish, _)] = texts(loaded, [wanted(loaded, seed, stop_ids=stop_ids)], 1)
            assert text.startswith("{")
            assert finish == "length" or isinstance(json.loads(text), dict)


def test_what_cannot_be_constrained_is_refused(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BatchEngine(loaded, max_requests=1)
    with pytest.raises(ConfigError, match="may cut the JSON object"):
        engine.submit(wanted(loaded, 0, stop=("}",)))
    monkeypatch.setattr(json_object, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="needs the package no_such_package"):
        engine.submit(wanted(loaded, 0))
    assert not engine.has_work


def test_a_trained_model_writes_the_beginning_of_an_object(shared_data: Path) -> None:
    loaded = load(shared_data / "stories260K")
    prompt = tuple(prompt_ids(loaded.tokenizer, "Lily wrote"))
    end = frozenset({loaded.tokenizer.end_of_document_id})
    requests = [
        Request(prompt, 90, Sampling(0.5 * seed, seed=seed), end, json_object=True) for seed in range(8)
    ]
    found = texts(loaded, requests, 8)
    assert texts(loaded, requests[:1], 1) == found[:1]
    for text, finish, tokens in found:
        # Stories have no closing brace, so that most texts are cut.
        if finish == "stop":
            assert isinstance(json.loads(text), dict)
            continue
        assert finish == "length" and tokens == 90
        with pytest.raises(json.JSONDecodeError) as cut:
            json.loads(text)
        unfinished = len(text.rstrip()) - len("false")
        assert cut.value.msg.startswith("Unterminated string") or cut.value.pos >= unfinished, text
