"""Requests for text that join and leave: their texts, stop strings, log probabilities, ends and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.errors import ConfigError
from megalite.generation.batch_engine import BatchEngine, Event
from megalite.generation.detokenise import Detokeniser, StopScan
from megalite.generation.loaded import LoadedModel
from megalite.generation.request import GREEDY, Request, Sampling, sampling_problems
from megalite.generation.source import ModelSource
from tests.support import reported_faults as faults
from tests.support.generation import generate_ids, mixed_requests
from tests.support.museum import exhibit
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.replicas import whole_replica
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, our_logits

DRAWN = Sampling(1.4, top_k=60, top_p=0.95, seed=7, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.5)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    shape = replace(tiny_shape(layers=2), vocab_size=384)
    file = tiny_tokenizer(folder)
    source = ModelSource(folder, "checkpoint", shape, tokenizer=file)
    stage = lively_stage(shape, scale=8.0)
    return LoadedModel(whole_replica(stage), load_tokenizer(file), source)


def run(engine: BatchEngine) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.number, []).append(event)
    assert engine.step() == []
    return found


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_request_gives_the_same_alone_and_among_others(loaded: LoadedModel, sampling: Sampling) -> None:
    requests = [
        replace(each, sampling=replace(sampling, seed=number))
        for number, each in enumerate(mixed_requests(12, 384, seed=3))
    ]
    together = BatchEngine(loaded, max_requests=5, prefill_chunk=6)
    numbers = [together.submit(each) for each in requests]
    found = run(together)
    for number, request in zip(numbers, requests, strict=True):
        alone = BatchEngine(loaded, max_requests=1)
        alone.submit(request)
        [events] = run(alone).values()
        assert [each.token for each in events] == [each.token for each in found[number]]
        assert text(events) == text(found[number])
        assert events[-1].finish == found[number][-1].finish == "length"
        kept = {key: value for key, value in vars(request).items() if key in ("sampling", "stop_ids")}
        ids = generate_ids(loaded.replica, request.prompt_ids, new_tokens=request.max_tokens, **kept)
        assert list(ids) == [each.token for each in events]


@exhibit(
    "imp#1310",
    subject="serving",
    there="a character that ended within a token was shown as a replacement mark, in a stream or in a whole answer",
    here="tokens are decoded as whole characters, one by one as all at once",
    fault=faults.HALF_CHARACTERS_ARE_SHOWN,
)
def test_the_text_is_that_of_all_tokens_at_once(loaded: LoadedModel) -> None:
    backend = loaded.tokenizer
    for words in ("每个阶段 sends the weights. ", "das Maß", "a 🙂 b", "no end \ufffd"):
        ids = backend.encode(words)
        for split in range(len(ids)):
            stream = Detokeniser(backend, ids[:split])
            pieces = [stream.push(each) for each in ids[split:]] + [stream.finish()]
            head = backend.decode(ids[:split])
            if not head.endswith("\ufffd"):
                assert head + "".join(pieces) == words
            assert "".join(pieces[:-1]).count("\ufffd") == 0 or "\ufffd" in words or head.endswith("\ufffd")


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    scan = StopScan(("END", "NOW!"))
    assert scan.push("a E") == ("a ", False)
    assert scan.push("N") == ("", False)
    assert scan.push("x NO") == ("ENx ", False)
    assert scan.push("W! END") == ("", True)
    assert scan.push("EN") == ("", False) and scan.finish() == "EN"


def test_a_stop_string_ends_the_text_before_it(loaded: LoadedModel) -> None:
    prompt = tuple(loaded.tokenizer.encode("the tensor waits for"))
    engine = BatchEngine(loaded)
    free = Request(prompt, 24, GREEDY, frozenset())
    engine.submit(free)
    [events] = run(engine).values()
    whole = text(events)
    stop = next(
        whole[at : at + 3]
        for at in range(4, len(whole))
        if whole.find(whole[at : at + 3]) == at and whole[at : at + 3].isprintable()
    )
    number = engine.submit(replace(free, stop=(stop, "never there")))
    other = engine.submit(replace(free, max_tokens=9))
    found = run(engine)
    assert text(found[number]) == whole[: whole.index(stop)]
    assert found[number][-1].finish == "stop" and len(found[number]) < 24
    assert [each.token for each in found[other]] == [each.token for each in events[:9]]
    # The token that completes the stop string is the last one.
    assert stop in loaded.tokenizer.decode([each.token for each in found[number]])
    ends = engine.submit(replace(free, stop_ids=frozenset({events[5].token})))
    found = run(engine)
    first = [each.token for each in events].index(events[5].token)
    assert [each.token for each in found[ends]] == [each.token for each in events[: first + 1]]
    assert text(found[ends]) == "".join(each.text for each in events[:first]) or first == 0
    assert found[ends][-1].finish == "stop"


def test_cancelled_requests_leave_the_others_as_they_are(loaded: LoadedModel) -> None:
    requests = mixed_requests(6, 384, seed=5)
    engine = BatchEngine(loaded, max_requests=3, prefill_chunk=4)
    numbers = [engine.submit(each) for each in requests]
    untouched = run(engine)
    numbers = [engine.submit(each) for each in requests]
    engine.cancel(numbers[5])
    seen: dict[int, list[int]] = {number: [] for number in numbers}
    for step in range(200):
        if step == 4:
            engine.cancel(numbers[0])
            engine.cancel(numbers[1])
            engine.cancel(12345)
        for event in engine.step():
            seen[event.number].append(event.token)
    assert not engine.has_work and not seen[numbers[5]]
    for place in (2, 3, 4):
        assert seen[numbers[place]] == [each.token for each in untouched[place]]


def test_log_probabilities_are_the_models(loaded: LoadedModel) -> None:
    prompt = tuple(loaded.tokenizer.encode("one rank sends"))
    engine = BatchEngine(loaded)
    number = engine.submit(Request(prompt, 5, DRAWN, frozenset(), logprobs=3))
    plain = engine.submit(Request(prompt, 5, DRAWN, frozenset()))
    found = run(engine)
    ids = [*prompt, *(each.token for each in found[number])]
    logs = our_logits(loaded.model, torch.tensor([ids]))[0].double().log_softmax(-1)
    for place, event in enumerate(found[number], start=len(prompt) - 1):
        assert_close(event.logprob, logs[place, event.token], rtol=FLOAT32_RTOL)
        best = logs[place].topk(3)
        assert [token for token, _ in event.top_logprobs] == best.indices.tolist()
        assert_close([value for _, value in event.top_logprobs], best.values, rtol=FLOAT32_RTOL)
    assert all(each.logprob is None and each.top_logprobs == () for each in found[plain])


def test_a_request_that_cannot_fit_is_refused(loaded: LoadedModel) -> None:
    engine = BatchEngine(loaded, max_tokens=20)
    with pytest.raises(ConfigError, match=r"tokens: 15 tokens .* max_tokens = 20, .*; use at most 5"):
        engine.submit(Request((1,) * 15, 6, GREEDY, frozenset()))
    with pytest.raises(ConfigError, match="prompt: is empty"):
        engine.submit(Request((), 6, GREEDY, frozenset()))
    with pytest.raises(ConfigError, match="prompt: has id 384"):
        engine.submit(Request((384,), 6, GREEDY, frozenset()))
    with pytest.raises(ConfigError, match="tokens: 0 is"):
        engine.submit(Request((3,), 0, GREEDY, frozenset()))
    assert not engine.has_work and engine.submit(Request((1,) * 15, 5, GREEDY, frozenset())) == 0


def test_a_long_prompt_does_not_stop_the_others(loaded: LoadedModel) -> None:
    engine = BatchEngine(loaded, prefill_chunk=4)
    short = engine.submit(Request((5, 6), 30, GREEDY, frozenset()))
    engine.step()
    long = engine.submit(Request(tuple(range(40)), 2, GREEDY, frozenset()))
    order = []
    while long not in order:
        order += [event.number for event in engine.step()]
    assert order == [short] * 10 + [long] or order == [short] * 9 + [short, long]


def test_requests_start_in_the_order_of_their_arrival(loaded: LoadedModel) -> None:
    engine = BatchEngine(loaded, max_requests=3, prefill_chunk=8)
    # One sends a dozen at once; those that come later wait for these and for nobody else.
    numbers = [engine.submit(each) for each in mixed_requests(12, 384, seed=5)]
    started: list[int] = []
    while engine.has_work:
        if len(started) in (2, 5, 9) and len(numbers) < 15:
            numbers.append(engine.submit(Request((7, len(numbers)), 3, GREEDY, frozenset())))
        started += [event.number for event in engine.step() if event.number not in started]
    assert started == numbers and len(numbers) == 15


def test_every_wrong_setting_is_named() -> None:
    values = {
        "min_p": 0.1,
        "repetition_penalty": 0.0,
        "presence_penalty": 3.0,
        "frequency_penalty": float("nan"),
    }
    problems = [str(each) for each in sampling_problems(1, values, stop=["a", ""], logprobs=21)]
    keys = ["min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "logprobs"]
    assert [each.partition(":")[0] for each in problems] == keys


def test_the_cache_is_on_the_device_of_the_mesh(tmp_path: Path, loaded: LoadedModel) -> None:
    engine = BatchEngine(loaded, max_requests=3, max_tokens=10)
    [cache] = engine._engine._caches.values()
    assert cache.device == loaded.replica.mesh.device and cache.size.slots == 3
    assert cache.of(1).shape == (2, 3, 4, 10, 6)
