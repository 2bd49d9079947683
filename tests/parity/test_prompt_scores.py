"""Log probabilities of prompts beside requests that generate, also over ranks, against transformers."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megalite.convert.huggingface.export import export
from megalite.generation import slots
from megalite.generation.request import Request
from megalite.generation.slots import TokenScore
from megalite.generation.token_engine import Sampled, TokenEngine
from megalite.model.kv_cache import CacheSize
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.generation import LONGEST, load_model, mixed_requests
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES
from tests.unit.convert.exporting import lively_stage, save_stage

FAMILIES = ("llama 3", "gemma2", "gpt2")
TOP = 3


@dataclass(frozen=True)
class Known:
    """A checkpoint, requests, and transformers' log probabilities [S, V] for the prompt of each that is scored."""

    checkpoint: Path
    requests: list[Request]
    log_probs: dict[int, torch.Tensor]


@pytest.fixture(scope="module", params=cases(FAMILIES, core=FAMILIES[:1]))
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    shape, folder = FAMILY_SHAPES[request.param], tmp_path_factory.mktemp("model")
    checkpoint = save_stage(folder, shape, lively_stage(shape, scale=5.0))
    export(checkpoint, folder / "export", None)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "export")
    requests = []
    for number, each in enumerate(mixed_requests(12, shape.vocab_size)):
        # The scores of one prompt come alone, those of another with new tokens, and a third is not scored.
        kinds = ({"max_tokens": 0, "logprobs": TOP}, {"logprobs": number % 2}, {})
        fields = kinds[number % 3]
        requests.append(replace(each, scores_prompt=bool(fields), **fields))
    # Its prompt begins as the one before it, whose keys must not be taken: they have no scores.
    longer = requests[-1].prompt_ids + requests[1].prompt_ids[:3]
    requests.append(replace(requests[0], prompt_ids=longer))
    log_probs = {}
    for number, each in enumerate(requests):
        if each.scores_prompt:
            with torch.no_grad():
                logits = theirs(torch.tensor([each.prompt_ids])).logits[0]
            log_probs[number] = logits.double().log_softmax(-1)
    return Known(checkpoint, requests, log_probs)


def run(checkpoint: Path, layout: Layout, requests: list[Request], slots: int, chunk: int) -> list[Sampled]:
    """Return all that an engine gives for the requests."""
    model = load_model(checkpoint, ParallelMesh.over_world(layout) if layout.world_size > 1 else None)
    engine = TokenEngine(model, CacheSize(slots, LONGEST), prefill_chunk=chunk)
    for number, request in enumerate(requests):
        engine.submit(number, request)
    sampled = []
    while engine.has_work:
        sampled += engine.step()
    return sampled


def tokens(sampled: list[Sampled], number: int) -> list[int]:
    return [each.token for each in sampled if each.number == number]


def assert_right(known: Known, sampled: list[Sampled]) -> None:
    """Compare the scores with transformers': they come once, with the first token, and no others do."""
    scored = {each.number: each.prompt_scores for each in sampled if each.prompt_scores}
    assert scored.keys() == known.log_probs.keys()
    assert sum(bool(each.prompt_scores) for each in sampled) == len(scored)
    for number, (first, *others) in scored.items():
        request, expected = known.requests[number], known.log_probs[number]
        assert first == TokenScore(request.prompt_ids[0])
        assert [score.token for score in others] == list(request.prompt_ids[1:])
        picked = [expected[at, score.token].item() for at, score in enumerate(others)]
        assert_close([score.logprob for score in others], picked, rtol=FLOAT32_RTOL)
        for at, score in enumerate(others):
            best = expected[at].topk(request.logprobs or 0)
            assert [token for token, _ in score.top_logprobs] == best.indices.tolist()
            assert_close([value for _, value in score.top_logprobs], best.values.tolist(), rtol=FLOAT32_RTOL)
        if request.max_tokens == 0:
            assert tokens(sampled, number) == [-1]


@pytest.mark.parametrize(("slots", "chunk"), [(1, 512), (5, 7), (16, 512)])
def test_scores_of_prompts_are_transformers(known: Known, slots: int, chunk: int) -> None:
    sampled = run(known.checkpoint, Layout(), known.requests, slots, chunk)
    assert_right(known, sampled)
    # The scores of some change no token of any.
    plain = [
        replace(each, scores_prompt=False, max_tokens=max(1, each.max_tokens)) for each in known.requests
    ]
    for number, request in enumerate(known.requests):
        if request.max_tokens:
            expected = tokens(run(known.checkpoint, Layout(), [plain[number]], 1, 512), 0)
            assert tokens(sampled, number) == expected


def test_scores_over_ranks_are_transformers(ranks, known: Known) -> None:
    arguments = {"checkpoint": known.checkpoint, "requests": known.requests, "slots": 5, "chunk": 7}
    for sampled in ranks.run(run, 4, layout=Layout(pipeline=2, tensor=2), **arguments):
        assert_right(known, sampled)


def test_scores_of_reused_keys_are_noticed(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of another slot have no hidden states, so that tokens of the prompt would have no score."""
    admit = slots.SlotTable._admit

    def with_reuse(table: slots.SlotTable, running: slots.Running) -> None:
        scored, running.request = running.request, replace(running.request, scores_prompt=False)
        admit(table, running)
        running.request = scored

    monkeypatch.setattr(slots.SlotTable, "_admit", with_reuse)
    with pytest.raises(AssertionError):
        assert_right(known, run(known.checkpoint, Layout(), known.requests, 1, 512))
