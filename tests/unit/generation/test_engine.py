"""Greedy generation against transformers' own, token for token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megalite.convert.huggingface.export import export
from megalite.errors import ConfigError
from megalite.model.context import StepContext
from megalite.topology.shape import ModelShape, RopeScaling
from tests.support.generation import generate_ids, load_model, one_slot, prompt_step
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.replicas import whole_replica
from tests.support.tiny import tiny_shape
from tests.unit.convert.exporting import lively_stage, our_logits, save_stage


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_are_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    shape = replace(tiny_shape(tied=tied), max_position_embeddings=128)
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape, scale=12.0))
    export(checkpoint, tmp_path / "export", None)
    theirs_model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    model = load_model(checkpoint)
    for prompt in ([5], [1, 2, 3, 4, 5, 6, 7], list(range(90, 20, -1))):
        theirs = theirs_model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[
            0, len(prompt) :
        ]
        ours = list(generate_ids(model, prompt, new_tokens=30))
        assert ours == theirs.tolist()
        assert len(set(ours)) > 5, "a model that repeats itself would hide a broken cache"


def test_the_cache_changes_nothing(tmp_path: Path) -> None:
    shape = tiny_shape()
    stage = lively_stage(shape)
    ids = [3, 14, 15]
    for chosen in generate_ids(whole_replica(stage), [3, 14, 15], new_tokens=30):
        assert chosen == int(our_logits(stage, torch.tensor([ids]))[0, -1].argmax())
        ids.append(chosen)
    assert len(ids) == 33


def test_a_stop_token_is_the_last(tmp_path: Path) -> None:
    stage = lively_stage(tiny_shape())
    free = list(generate_ids(whole_replica(stage), [7], new_tokens=30))
    stop = free[4]
    assert (
        list(generate_ids(whole_replica(stage), [7], new_tokens=30, stop_ids={stop}))
        == free[: free.index(stop) + 1]
    )


def test_a_request_beyond_the_models_positions_is_refused() -> None:
    stage = lively_stage(tiny_shape())
    assert len(list(generate_ids(whole_replica(stage), [7] * 60, new_tokens=4))) == 4
    with pytest.raises(ConfigError, match=r"60 tokens of the prompt and 5 new ones .* = 64; use at most 4"):
        generate_ids(whole_replica(stage), [7] * 60, new_tokens=5)
    with pytest.raises(ConfigError, match="prompt: is empty"):
        generate_ids(whole_replica(stage), [], new_tokens=5)


_FACTORS = {"short_factor": (1.0, 1.2, 1.5), "long_factor": (1.0, 3.0, 9.0)}
SCALED = {
    "dynamic": replace(tiny_shape(), max_position_embeddings=16, rope_scaling=RopeScaling("dynamic", 4.0)),
    "longrope": replace(
        tiny_shape(),
        rope_scaling=RopeScaling("longrope", 4.0, original_max_position_embeddings=16, **_FACTORS),
    ),
}


@pytest.mark.parametrize("shape", SCALED.values(), ids=SCALED)
def test_generation_past_the_original_length_is_that_of_transformers(
    shape: ModelShape, tmp_path: Path
) -> None:
    """Keys in the cache stay as they were rotated; a new token has the frequencies of the whole length."""
    stage = lively_stage(shape, scale=12.0)
    checkpoint = save_stage(tmp_path, shape, stage)
    export(checkpoint, tmp_path / "export", None)
    model = load_model(checkpoint)
    for prompt in (list(range(10)), list(range(16)), list(range(40, 20, -1))):
        theirs_model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        theirs = theirs_model.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ours = list(generate_ids(model, prompt, new_tokens=24))
        assert ours == theirs.sequences[0, len(prompt) :].tolist()
        cache, length = one_slot(stage, len(prompt) + 24), 0
        ids = [prompt, *([each] for each in ours[:-1])]
        for new, expected in zip(ids, theirs.logits, strict=True):
            positions = torch.arange(length, length + len(new))[None]
            step = prompt_step(cache, length, len(new))
            with torch.no_grad():
                hidden = stage.whole.decode(torch.tensor([new]), positions, StepContext(cache=step))
                logits = stage.whole.logits(hidden[:, -1:])[:, 0]
            length += len(new)
            assert_close(logits, expected, rtol=FLOAT32_RTOL, what=f"logits after {length}")
    with pytest.raises(ConfigError, match=r"use at most 24"):
        generate_ids(model, [7] * (shape.longest_sequence - 24), new_tokens=25)
