"""Beam search, also over tensor- and pipeline-parallel ranks, against transformers' own."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megalite.convert.huggingface.export import export
from megalite.generation.beam_search import beam_search
from megalite.generation.beams import BeamSettings
from megalite.generation.engine import load_model
from megalite.generation.request import GREEDY, Request
from megalite.model.kv_cache import KeyValueCache
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.parity import BF16_RTOL, FLOAT32_RTOL, assert_close
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES
from tests.unit.convert.exporting import lively_stage, save_stage

FAMILIES = ("llama 3", "gemma2", "gpt2")
# The tokens of the prompt and the maximum of new ones.
SIZES = [(1, 9), (13, 14)]
SETTINGS = [BeamSettings(beams, penalty) for beams in (2, 4) for penalty in (0.0, 1.0, 2.0)]
# How many different tokens end a text.
ENDS = (0, 1, 2)


@dataclass(frozen=True)
class Search:
    """A request, its settings, and the tokens and the score that transformers finds."""

    request: Request
    settings: BeamSettings
    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Known:
    """A checkpoint and searches with its model."""

    checkpoint: Path
    searches: list[Search]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Known] = {}

    def of(family: str) -> Known:
        if family not in made:
            made[family] = _made(family, tmp_path_factory.mktemp("model"))
        return made[family]

    return of


def _made(family: str, folder: Path) -> Known:
    shape = FAMILY_SHAPES[family]
    checkpoint = save_stage(folder, shape, lively_stage(shape, scale=5.0))
    export(checkpoint, folder / "export", None)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "export")
    generator, searches = torch.Generator().manual_seed(7), list[Search]()
    for length, most in SIZES:
        prompt = tuple(torch.randint(shape.vocab_size, (length,), generator=generator).tolist())
        for settings in SETTINGS:
            plain = _searched(theirs, Request(prompt, most, GREEDY, frozenset()), settings)
            searches.append(plain)
            for ends in ENDS[1:]:
                # Tokens that beams come upon, so that some of them end early.
                stop = frozenset(dict.fromkeys(plain.tokens[2:])) if ends == 1 else frozenset(plain.tokens)
                request = Request(prompt, most, GREEDY, frozenset(sorted(stop)[:ends]))
                searches.append(_searched(theirs, request, settings))
    lengths = {len(each.tokens) - each.request.max_tokens for each in searches if each.request.stop_ids}
    assert len(lengths) > 2, "some texts have to end early, and at several lengths"
    return Known(checkpoint, searches)


def _searched(theirs: PreTrainedModel, request: Request, settings: BeamSettings) -> Search:
    ids = torch.tensor([request.prompt_ids])
    found = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_tokens,
        num_beams=settings.beams,
        do_sample=False,
        length_penalty=settings.length_penalty,
        early_stopping=False,
        eos_token_id=sorted(request.stop_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = tuple(found.sequences[0, ids.shape[1] :].tolist())
    return Search(request, settings, tokens, float(found.sequences_scores[0]))


def assert_found(checkpoint: Path, layout: Layout, searches: list[Search], prefill_chunk: int) -> None:
    model = load_model(checkpoint, ParallelMesh.over_world(layout) if layout.world_size > 1 else None)
    for each in searches:
        found = beam_search(model, each.request, each.settings, prefill_chunk=prefill_chunk)
        assert found.tokens == each.tokens, each
        assert_close(found.score, each.score, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("family", cases(FAMILIES, core=FAMILIES[:1]))
def test_beams_are_those_of_transformers(known, family):
    given = known(family)
    assert_found(given.checkpoint, Layout(), given.searches, 512)
    assert_found(given.checkpoint, Layout(), given.searches[-1:], 4)


def test_beams_over_ranks_are_those_of_transformers(ranks, known):
    given, layout = known(FAMILIES[0]), Layout(pipeline=2, tensor=2)
    arguments = {"checkpoint": given.checkpoint, "searches": given.searches[::5], "prefill_chunk": 6}
    ranks.run(assert_found, layout.world_size, layout=layout, **arguments)


def test_beams_in_bfloat16_are_as_good_as_transformers(known):
    given = known(FAMILIES[0])
    ours = load_model(given.checkpoint, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(
        given.checkpoint.parent.parent / "export", dtype=torch.bfloat16
    )
    for each in given.searches[::3]:
        request, settings = each.request, each.settings
        found, expected = beam_search(ours, request, settings), _searched(theirs, request, settings)
        # Rounding may decide between two beams; the same text has the same score.
        again = (
            _score(theirs, request.prompt_ids, found.tokens) / len(found.tokens) ** settings.length_penalty
        )
        assert_close(found.score, again, rtol=BF16_RTOL)
        assert_close(max(found.score, expected.score), found.score, rtol=BF16_RTOL)


def _score(theirs: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
    """Return the log probability of the new tokens."""
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return float(logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum())


def test_slots_that_are_not_reordered_change_tokens(known, monkeypatch):
    given, reorder = known(FAMILIES[0]), KeyValueCache.reorder

    def only_the_prompt(self, sources, begin, end):
        if begin == 0:
            reorder(self, sources, begin, end)

    monkeypatch.setattr(KeyValueCache, "reorder", only_the_prompt)
    with pytest.raises(AssertionError):
        assert_found(given.checkpoint, Layout(), given.searches, 512)
