"""Greedy tokens of many requests at a time, over tensor- and pipeline-parallel ranks, against transformers' own."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megalite.convert.huggingface.export import export
from megalite.generation import slots
from megalite.generation.request import Request
from megalite.model import kv_cache
from megalite.topology.axes import Layout
from tests.support.generation import load_model, mixed_requests, run_requests, tokens_on_rank
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES
from tests.unit.convert.exporting import lively_stage, save_stage

# Latent attention with and without a vector for queries, in mixtures with and without groups of experts.
LATENT = ("deepseek_v2, one query projection, biases", "deepseek_v3")
SHAPES = FAMILY_SHAPES | MIXTURE_SHAPES
CORE = ("llama 3", "gemma2", "mistral", LATENT[1])
EXTENDED = (
    *(LATENT[0], "gpt_oss"),
    *("gpt2", "phi", "gemma3", "granite", "granitemoe", "olmo2", "smollm3 with windows"),
)
LAYOUTS = [
    Layout(pipeline=pipeline, tensor=tensor)
    for pipeline in (1, 2)
    for tensor in (1, 2, 4)
    if pipeline * tensor > 1
]
# How the requests run: how many at a time, the most tokens of prompts in a forward, how many join later.
WAYS = [
    {"slots": 1, "chunk": 512},
    {"slots": 16, "chunk": 512},
    {"slots": 5, "chunk": 7, "joining": 6},
    {"slots": 3, "chunk": 1, "joining": 2},
]


@dataclass(frozen=True)
class Known:
    """A model in a checkpoint, requests, and transformers' greedy tokens of each."""

    checkpoint: Path
    requests: list[Request]
    tokens: dict[int, list[int]]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Known] = {}

    def of(family: str) -> Known:
        if family not in made:
            made[family] = _made(family, tmp_path_factory.mktemp("model"))
        return made[family]

    return of


def _made(family: str, folder: Path) -> Known:
    shape = SHAPES[family]
    stage = lively_stage(shape, scale=8.0)
    drawn = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in stage.named_parameters():
            if "norm" in name and name.endswith("bias"):
                tensor.sub_(1)  # large ones would decide every token
            elif name.endswith("sinks") or (".mlp." in name and family == "gpt_oss" and not tensor.any()):
                tensor.normal_(generator=drawn)
    checkpoint = save_stage(folder, shape, stage)
    export(checkpoint, folder / "export", None)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "export")
    requests = mixed_requests(16, shape.vocab_size)
    tokens = {}
    for number, request in enumerate(requests):
        ids = torch.tensor([request.prompt_ids])
        whole = theirs.generate(ids, max_new_tokens=request.max_tokens, do_sample=False, eos_token_id=None)
        tokens[number] = whole[0, ids.shape[1] :].tolist()
    assert len({each for row in tokens.values() for each in row}) > 5, "repetition would hide a broken cache"
    return Known(checkpoint, requests, tokens)


def families() -> list[Any]:
    """The core, further families that every change runs, and the others."""
    rest = [each for each in FAMILY_SHAPES if each not in (*CORE, *EXTENDED)]
    slow = [pytest.param(each, marks=pytest.mark.slow) for each in rest]
    return cases([*CORE, *EXTENDED, *slow], core=CORE)


@pytest.mark.parametrize("family", families())
def test_tokens_are_those_of_transformers(known, family):
    given = known(family)
    model = load_model(given.checkpoint)
    for way in WAYS:
        assert run_requests(model, given.requests, **way) == given.tokens, way


def _attend_by_torch(patch):
    """Switch the compiled attention of decode steps off."""
    patch(kv_cache, "compiled_serves", lambda _: False)


@pytest.mark.parametrize("family", cases([*CORE, "smollm3 with windows"], core=("gemma2",)))
def test_tokens_without_the_compiled_attention_are_the_same(known, monkeypatch, family):
    given = known(family)
    _attend_by_torch(monkeypatch.setattr)
    assert run_requests(load_model(given.checkpoint), given.requests, **WAYS[2]) == given.tokens


@pytest.mark.parametrize(
    ("family", "layout"),
    cases(
        [
            ("gemma2", Layout(pipeline=2, tensor=2)),
            ("llama 3", Layout(tensor=4)),
            ("llama 3", Layout(pipeline=2)),
            (LATENT[1], Layout(pipeline=2, tensor=2)),
            ("gpt_oss", Layout(pipeline=2, tensor=2)),
        ],
        core=[("gemma2", Layout(pipeline=2, tensor=2))],
    ),
)
def test_tokens_over_ranks_are_those_of_transformers(ranks, known, family, layout):
    given = known(family)
    arguments = {"checkpoint": given.checkpoint, "requests": given.requests, "dtype": "float32"}
    for way in WAYS[1:3]:
        held = ranks.run(tokens_on_rank, layout.world_size, layout=layout, how=way, **arguments)
        assert held == [given.tokens] * layout.world_size


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", FAMILY_SHAPES)
def test_every_family_over_ranks(ranks, known, family, layout):
    given = known(family)
    arguments = {"checkpoint": given.checkpoint, "requests": given.requests, "dtype": "float32"}
    held = ranks.run(tokens_on_rank, layout.world_size, layout=layout, how=WAYS[2], **arguments)
    assert held == [given.tokens] * layout.world_size


def _without_moving(self, one, other, tokens):
    """Exchanges two requests, but not their keys."""


def _one_too_few(visible):
    """Rows of several lengths do not see their own key."""

    def changed(self, window):
        found = visible(self, window)
        if found.bias is None:
            return found
        return replace(found, bias=found.bias.roll(-1, dims=-1))

    return changed


def _mask_by_torch(patch):
    _attend_by_torch(patch)
    patch(kv_cache.CachedStep, "_visible", _one_too_few(kv_cache.CachedStep._visible))


FAULTS = {
    "keys stay where they were": lambda patch: patch(kv_cache.KeyValueCache, "swap", _without_moving),
    "reused keys are not copied": lambda patch: patch(kv_cache.KeyValueCache, "copy", _without_moving),
    "the mask of a decode step is off by one": _mask_by_torch,
    "the lengths of the slots are off by one": lambda patch: patch(
        kv_cache.CachedStep, "held", property(lambda self: (torch.tensor(self.lengths) - 1).clamp(min=0))
    ),
    "a piece of a prompt begins at position zero": lambda patch: patch(
        kv_cache.CachedStep,
        "position_ids",
        property(
            lambda self: [*self.lengths, *(place for each in self.segments for place in range(each.count))]
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_tokens(known, monkeypatch, fault):
    given = known("llama 3")
    monkeypatch.setattr(slots, "_SHORTEST_REUSE", 1)
    model = load_model(given.checkpoint)
    assert run_requests(model, given.requests, **WAYS[2]) == given.tokens
    FAULTS[fault](monkeypatch.setattr)
    assert run_requests(model, given.requests, **WAYS[2]) != given.tokens
