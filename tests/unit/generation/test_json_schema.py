"""Constrained decoding: every whole text follows its JSON schema, the same alone and in a batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import from_json

from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.errors import ConfigError
from megalite.generation import json_schema
from megalite.generation.batch_engine import BatchEngine
from megalite.generation.json_schema import JSON_OBJECT, JsonGrammars, schema_text
from megalite.generation.loaded import LoadedModel, load
from megalite.generation.prompts import prompt_ids
from megalite.generation.request import Request, Sampling
from megalite.generation.source import ModelSource
from tests.support.replicas import whole_replica
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
    stage = lively_stage(shape, scale=3.0)
    return LoadedModel(
        whole_replica(stage), load_tokenizer(file), ModelSource(folder, "checkpoint", shape, tokenizer=file)
    )


def wanted(loaded: LoadedModel, seed: int, **settings: object) -> Request:
    tokenizer = loaded.tokenizer
    prompt = tuple(tokenizer.encode("one rank " * (1 + seed % 5)))
    request = Request(
        prompt, 120, Sampling(), frozenset({tokenizer.end_of_document_id}), json_schema=JSON_OBJECT
    )
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
    free = [replace(each, json_schema=None) for each in requests]
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


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Leaf(Closed):
    kind: Literal["leaf"]
    weight: Annotated[int, Field(ge=-5, le=120)]


class Tree(Closed):
    kind: Literal["tree"]
    leaves: Annotated[list[Leaf], Field(min_length=1, max_length=2)]
    left: "Tree | None"


class Row(Closed):
    name: Annotated[str, Field(max_length=6)]
    plant: Annotated[Leaf | Tree, Field(discriminator="kind")]
    mark: bool | None = None


# Numbers and a choice between texts that begin alike: only a stop token ends them.
KINDS: list[Any] = [Row, Tree, Annotated[int, Field(ge=100, le=9999)], Literal["a", "ab", 1, 12], list[Leaf]]


def schema_of(kind: Any) -> str:
    return schema_text(TypeAdapter(kind).json_schema())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_whole_texts_follow_the_schema_and_cut_ones_begin_so(loaded: LoadedModel, kind: Any) -> None:
    requests = [
        wanted(loaded, seed, json_schema=schema_of(kind), max_tokens=60 + seed * 20) for seed in range(6)
    ]
    found = texts(loaded, [*requests, replace(requests[0], json_schema=None)], 4)
    assert texts(loaded, requests[1:2], 1) == found[1:2]
    finishes = [finish for _, finish, _ in found[:-1]]
    assert finishes.count("stop") > 1
    for (text, finish, tokens), request in zip(found, requests, strict=False):
        if finish == "stop":
            TypeAdapter(kind).validate_json(text)
        else:
            assert tokens == request.max_tokens
            from_json(text, allow_partial="trailing-strings")


def test_numbers_have_more_than_one_digit_and_end_without_a_stop_token_too(loaded: LoadedModel) -> None:
    schema = schema_of(Annotated[int, Field(ge=0, le=99999)])
    plain = [wanted(loaded, seed, json_schema=schema) for seed in range(1, 40, 2)]
    requests = [replace(each, stop_ids=frozenset()) for each in plain]
    for found in (texts(loaded, plain, 8), texts(loaded, requests, 8)):
        assert all(finish == "stop" and 0 <= int(text) <= 99999 for text, finish, _ in found)
        assert max(len(text) for text, _, _ in found) > 2


def test_a_limit_within_a_text_cuts_it_and_no_other_one(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(json_schema.LIMITS, "max_lexer_states", 30)
    slow = schema_text({"type": "string", "pattern": "^.*a.{20}b.{20}c$"})
    requests = [wanted(loaded, 3, json_schema=slow), wanted(loaded, 3, json_schema=None)]
    [(cut, finish, tokens), free] = texts(loaded, requests, 2)
    assert finish == "length" and 1 < tokens < 120 and cut.startswith('"') and '"' not in cut[1:]
    assert texts(loaded, requests[1:], 1) == [free]


REFUSED = {
    "keyword": ({"not": {"type": "string"}}, r'llguidance: Unimplemented keys: \["not"\]'),
    "reference": ({"$ref": "https://example.com/schema.json"}, "does not fetch"),
    "pattern": ({"type": "string", "pattern": "(a"}, "llguidance: "),
    "no value": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable"),
    "slow number": ({"type": "integer", "multipleOf": 9999991}, "takes more than 0.25 s or 1024 MiB"),
    "slow text": (
        {"allOf": [{"type": "string", "pattern": f".*{each}.{{10}}{each}"} for each in "abcdefghijklmnopqr"]},
        "takes more than 0.25 s or 1024 MiB",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_llguidance_refuses_is_refused_soon(loaded: LoadedModel, name: str) -> None:
    schema, cause = REFUSED[name]
    engine = BatchEngine(loaded, max_requests=1)
    with pytest.raises(ConfigError, match=f"json_schema: .*{cause}.*; change the schema"):
        engine.submit(wanted(loaded, 0, json_schema=schema_text(schema)))
    assert not engine.has_work


def test_schemas_have_limits(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"items": deep}
    for schema, cause in (
        (deep, "is nested more than 64 levels deep"),
        ({"properties": {str(each): {} for each in range(1001)}}, "has 1001 keys in one object"),
        ({"enum": ["x" * 100] * 1000}, r"has \d+ bytes, more than 65536"),
        ({"x-guidance": {"lenient": True}}, "has x-guidance"),
    ):
        with pytest.raises(ConfigError, match=cause):
            schema_text(schema)
    monkeypatch.setattr(json_schema, "_KEPT", 2)
    monkeypatch.setattr(json_schema, "compile_problem", lambda schema: tried.append(schema))
    tried: list[str] = []
    grammars = JsonGrammars(loaded.tokenizer)
    schemas = [schema_text({"const": each}) for each in range(3)]
    for at in (0, 1, 0, 2, 0, 1):
        grammars.check(schemas[at])
    assert tried == [schemas[at] for at in (0, 1, 2, 1)]


def test_as_many_optional_properties_as_a_schema_may_have(loaded: LoadedModel) -> None:
    many = {"type": "object", "properties": {f"p{each}": {"enum": [1]} for each in range(1000)}}
    many["required"] = ["p999"]
    [(text, _, tokens)] = texts(loaded, [wanted(loaded, 1, json_schema=schema_text(many), max_tokens=9)], 1)
    assert text.startswith("{") and tokens == 9


def test_what_cannot_be_constrained_is_refused(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BatchEngine(loaded, max_requests=1)
    with pytest.raises(ConfigError, match="may cut the JSON of json_schema"):
        engine.submit(wanted(loaded, 0, stop=("}",)))
    monkeypatch.setattr(json_schema, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="needs the package no_such_package"):
        engine.submit(wanted(loaded, 0))
    assert not engine.has_work


def test_a_trained_model_writes_the_beginning_of_an_object(shared_data: Path) -> None:
    loaded = load(shared_data / "stories260K")
    prompt = tuple(prompt_ids(loaded.tokenizer, "Lily wrote"))
    end = frozenset({loaded.tokenizer.end_of_document_id})
    requests = [
        Request(prompt, 90, Sampling(0.5 * seed, seed=seed), end, json_schema=JSON_OBJECT)
        for seed in range(8)
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
