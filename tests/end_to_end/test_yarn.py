"""A pretrained model read to four times its length with YaRN: perplexity by position beside that of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megalite.cli import convert
from tests.support.generation import load_model
from tests.support.parity import FLOAT32_GRADIENT_RTOL, assert_close
from tests.unit.convert.exporting import our_logits

TRAINED, FACTOR, STORIES = 512, 4, 64
YARN = {"rope_type": "yarn", "factor": float(FACTOR), "original_max_position_embeddings": TRAINED}
# rope_parameters of transformers 5, and what older and DeepSeek's files say.
WORDS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": YARN | {"rope_theta": 10000.0}},
    "type": {"rope_scaling": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}},
    "all numbers": {
        "rope_parameters": YARN
        | {"rope_theta": 10000.0, "beta_fast": 16, "beta_slow": 2, "mscale": 1.2, "mscale_all_dim": 0.7}
    },
    "own factor, not rounded": {
        "rope_parameters": YARN | {"rope_theta": 10000.0, "attention_factor": 1.1, "truncate": False}
    },
}


@pytest.fixture(scope="module")
def text(shared_data: Path) -> torch.Tensor:
    """Stories of the model's own, [sequences, 2048]: as many as fill them, end to end."""
    model = AutoModelForCausalLM.from_pretrained(shared_data / "stories260K", dtype=torch.float32).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        begin = torch.full((STORIES, 1), model.config.bos_token_id)
        length = {"max_length": 256, "min_length": 256, "eos_token_id": None, "pad_token_id": 0}
        stories = model.generate(begin, do_sample=True, **length)
    return stories.reshape(-1, FACTOR * TRAINED)


def folder_with(rope: dict[str, Any], source: Path, folder: Path) -> Path:
    """Write the model with another rotary embedding and room for four times the positions."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    if "rope_parameters" not in rope:
        del config["rope_parameters"]
    longer = {"max_position_embeddings": FACTOR * TRAINED, **rope}
    (folder / "config.json").write_text(json.dumps(config | longer))
    shutil.copy(source / "model.safetensors", folder)
    return folder


def losses(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """[sequences, S] -> the loss of each position after the first, [sequences, S - 1]."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), text[:, 1:], reduction="none")


def their_losses(folder: Path, text: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return losses(model.eval()(text).logits, text)


def our_losses(folder: Path, text: torch.Tensor) -> torch.Tensor:
    run = folder.with_name(f"{folder.name} imported")
    assert convert.run(["import", str(folder), str(run)]) == 0
    [checkpoint] = (run / "checkpoints").glob("step-*")
    return losses(our_logits(load_model(checkpoint).stage, text), text)


@pytest.mark.parametrize("name", WORDS)
def test_the_loss_of_each_position_is_that_of_transformers(name, text, shared_data, tmp_path):
    folder = folder_with(WORDS[name], shared_data / "stories260K", tmp_path / "model")
    ours, theirs = (losses_of(folder, text[:1]) for losses_of in (our_losses, their_losses))
    # transformers computes the angles of 2048 positions in float32.
    assert_close(ours, theirs, rtol=FLOAT32_GRADIENT_RTOL, what="losses by position")


def test_perplexity_stays_level_beyond_the_trained_length(text, shared_data, tmp_path):
    """Without training at that length: YaRN costs within the trained one, and pays at the end of the longer one."""
    perplexities = {}
    for name, rope in {"default": {}, "yarn": WORDS["yarn"]}.items():
        source = shared_data / "stories260K"
        folder = folder_with({"rope_parameters": {"rope_theta": 10000.0}} | rope, source, tmp_path / name)
        of_positions = our_losses(folder, text).mean(dim=0).split(TRAINED)
        perplexities[name] = [part.mean().exp().item() for part in of_positions]
    plain, stretched = perplexities["default"], perplexities["yarn"]
    assert plain == sorted(plain) and plain[-1] > 1.5 * plain[0]
    assert max(stretched) < 1.25 * stretched[0]
    assert stretched[-1] < 0.95 * plain[-1]
