"""Prompts whose tokens context-parallel ranks share have the tokens and log-probabilities of one process."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megalite.generation.request import GREEDY, Request, Sampling
from megalite.generation.token_engine import Sampled, TokenEngine
from megalite.model.kv_cache import CacheSize
from megalite.parallel.context_prefill import SegmentShare
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.generation import load_model
from tests.support.parity import LAYOUT_RTOL, assert_close, relative_error
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES
from tests.unit.convert.exporting import lively_stage, save_stage

LONGEST = 320
FAMILIES = ("llama 3", "gemma2", "gpt2", "deepseek_v3")


def checkpoint_of(family: str, folder: Path) -> Path:
    shape = replace({**FAMILY_SHAPES, **MIXTURE_SHAPES}[family], max_position_embeddings=LONGEST)
    return save_stage(folder, shape, lively_stage(shape, scale=8.0))


def requests(vocabulary: int) -> list[Request]:
    """Prompts of lengths that do not divide, short ones, one that begins as another, one that gets scores."""
    generator = torch.Generator().manual_seed(4)
    prompts = [
        torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (67, 5, 231, 90)
    ]
    prompts.append(prompts[2][:150] + prompts[0])
    sampled = Sampling(1.2, top_k=40, seed=7)
    made = [
        Request(tuple(prompt), 6, sampled if at % 2 else GREEDY, frozenset(), logprobs=2)
        for at, prompt in enumerate(prompts)
    ]
    made[3] = replace(made[3], scores_prompt=True)
    return made


def run(checkpoint: Path, layout: Layout, chunk: int, shuffled: bool = False) -> tuple[list[Sampled], int]:
    """Return all that an engine gives, by request, and how often keys were gathered."""
    mesh = ParallelMesh.over_world(layout) if layout.world_size > 1 else None
    model = load_model(checkpoint, mesh, torch.float64)
    engine = TokenEngine(model, CacheSize(2, LONGEST), prefill_chunk=chunk)
    for number, request in enumerate(requests(model.shape.vocab_size)):
        engine.submit(number, request)
    sampled, count, gathered = list[Sampled](), 0, SegmentShare.gathered

    def counted(share: SegmentShare, values: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return gathered(share, values).roll(int(shuffled), 0)

    with patch.object(SegmentShare, "gathered", counted):
        while engine.has_work:
            sampled += engine.step()
    return sorted(sampled, key=lambda each: each.number), count


def numbers(sampled: list[Sampled]) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Return the tokens, and all log-probabilities."""
    logs = [value for each in sampled for value in (each.logprob, *(log for _, log in each.top_logprobs))]
    logs += [score.logprob for each in sampled for score in each.prompt_scores[1:]]
    return [(each.number, each.token) for each in sampled], torch.tensor(logs, dtype=torch.float64)


@pytest.mark.parametrize(
    ("family", "layout"),
    cases(
        [
            *((family, Layout(context=2)) for family in FAMILIES),
            ("gemma2", Layout(context=2, pipeline=2)),
            ("llama 3", Layout(context=3)),
        ],
        core=[("gemma2", Layout(context=2))],
    ),
)
def test_tokens_and_log_probabilities_are_those_of_one_process(
    ranks, tmp_path: Path, family: str, layout: Layout
) -> None:
    checkpoint = checkpoint_of(family, tmp_path)
    tokens, logs = numbers(run(checkpoint, Layout(), 512)[0])
    for chunk in (50, 512):
        for sampled, gathered in ranks.run(
            run, layout.world_size, checkpoint=checkpoint, layout=layout, chunk=chunk
        ):
            assert gathered > 0
            found = numbers(sampled)
            assert found[0] == tokens
            assert_close(found[1], logs, rtol=LAYOUT_RTOL)
    if layout == Layout(context=2):
        wrong = ranks.run(
            run, layout.world_size, checkpoint=checkpoint, layout=layout, chunk=512, shuffled=True
        )
        assert all(relative_error(numbers(sampled)[1], logs) > LAYOUT_RTOL for sampled, _ in wrong)
