"""Greedy generation against transformers' own, token for token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megalite.convert.huggingface.export import export
from megalite.errors import ConfigError
from megalite.generate.engine import generate, load_model
from megalite.model.replica import Replica
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
        ours = list(generate(model, prompt, new_tokens=30))
        assert ours == theirs.tolist()
        assert len(set(ours)) > 5, "a model that repeats itself would hide a broken cache"


def test_the_cache_changes_nothing(tmp_path: Path) -> None:
    shape = tiny_shape()
    stage = lively_stage(shape)
    ids = [3, 14, 15]
    for chosen in generate(Replica.whole(stage), [3, 14, 15], new_tokens=30):
        assert chosen == int(our_logits(stage, torch.tensor([ids]))[0, -1].argmax())
        ids.append(chosen)
    assert len(ids) == 33


def test_a_stop_token_is_the_last(tmp_path: Path) -> None:
    stage = lively_stage(tiny_shape())
    free = list(generate(Replica.whole(stage), [7], new_tokens=30))
    stop = free[4]
    assert (
        list(generate(Replica.whole(stage), [7], new_tokens=30, stop_ids={stop}))
        == free[: free.index(stop) + 1]
    )


def test_a_request_beyond_the_models_positions_is_refused() -> None:
    stage = lively_stage(tiny_shape())
    assert len(list(generate(Replica.whole(stage), [7] * 60, new_tokens=4))) == 4
    with pytest.raises(ConfigError, match=r"60 tokens of the prompt and 5 new ones .* = 64; use at most 4"):
        generate(Replica.whole(stage), [7] * 60, new_tokens=5)
    with pytest.raises(ConfigError, match="--prompt: is empty"):
        generate(Replica.whole(stage), [], new_tokens=5)
