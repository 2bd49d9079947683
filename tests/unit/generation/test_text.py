"""megalite.load and megalite.generate: the text of the command, from a run, a checkpoint and a Hugging Face folder."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import megalite
from megalite.cli import convert
from megalite.cli import generate as command
from megalite.errors import CheckpointError, ConfigError
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    return shared_data / "stories260K"


@pytest.fixture(scope="module")
def run(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    assert convert.run(["import", str(stories), str(folder)]) == 0
    return folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert command.run(arguments) == 0
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.parametrize("place", ["run", "checkpoint", "Hugging Face folder"])
def test_the_text_is_that_of_the_command(
    run: Path, stories: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [checkpoint] = (run / "checkpoints").glob("step-*")
    path = {"run": run, "checkpoint": checkpoint, "Hugging Face folder": stories}[place]
    loaded = megalite.load(path)
    assert loaded.config.hidden_size == 64 and loaded.tokenizer.vocab_size == loaded.config.vocab_size == 512
    text = megalite.generate(loaded, PROMPT, tokens=30)
    assert text.startswith(f"{PROMPT}, there was a little girl named Lily.")
    assert text == printed(capsys, str(path), "--prompt", PROMPT, "--tokens", "30")
    drawn = {"tokens": 20, "temperature": 1.0, "top_k": 40, "top_p": 0.9}
    flags = [text for name, value in drawn.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert megalite.generate(loaded, PROMPT, seed=5, **drawn) == printed(
        capsys, str(path), "--prompt", PROMPT, "--seed", "5", *flags
    )
    assert len({megalite.generate(loaded, PROMPT, seed=seed, **drawn) for seed in range(4)}) > 2


def test_a_list_of_prompts_is_a_list_of_their_texts_in_order(stories: Path) -> None:
    loaded = megalite.load(stories)
    prompts = [f"{PROMPT} {'very ' * number}" for number in range(18)]
    texts = megalite.generate(loaded, prompts, tokens=6, stop=["."])
    assert [texts[number] for number in (0, 5, 17)] == [
        megalite.generate(loaded, prompts[number], tokens=6, stop=["."]) for number in (0, 5, 17)
    ]
    assert len(texts) == 18 and megalite.generate(loaded, []) == []
    with pytest.raises(ConfigError, match=r"prompt\[1\]: tokens: .* exceed model\.max_position_embeddings"):
        megalite.generate(loaded, [PROMPT, "far " * 600], tokens=6)


def test_logits_are_those_of_transformers(stories: Path) -> None:
    ids = AutoTokenizer.from_pretrained(stories)(PROMPT, return_tensors="pt")["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
    loaded = megalite.load(stories)
    assert_close(loaded.logits(ids), expected, rtol=FLOAT32_RTOL)
    names = {name for name, _ in loaded.model.named_parameters()}
    assert "model.layers.0.self_attn.qkv_proj.weight" in names


def test_step_device_and_type_are_taken(tmp_path: Path) -> None:
    shape = replace(tiny_shape(layers=1), vocab_size=384)
    (tmp_path / "tokenizer").mkdir()
    tiny_tokenizer(tmp_path / "tokenizer")
    stages = {step: lively_stage(shape, scale=scale) for step, scale in ((10, 2.0), (20, 5.0))}
    for step, stage in stages.items():
        save_stage(tmp_path, shape, stage, step=step)
    name = "model.layers.0.mlp.down_proj.weight"
    for step, stage in stages.items():
        loaded = megalite.load(tmp_path, step=step, device="cpu", dtype=torch.bfloat16)
        found = dict(loaded.model.named_parameters())[name]
        assert torch.equal(found, dict(stage.named_parameters())[name].bfloat16())
        assert found.device.type == "cpu" and loaded.source.folder.name == f"step-{step:06d}"
    assert torch.equal(
        dict(megalite.load(tmp_path).model.named_parameters())[name],
        dict(stages[20].named_parameters())[name],
    )
    assert megalite.generate(loaded, "one rank", tokens=3).startswith("one rank")
    with pytest.raises(CheckpointError, match="no checkpoint of step 30; it has those of 10, 20"):
        megalite.load(tmp_path, step=30)


def test_all_wrong_values_are_named_at_once(stories: Path, tmp_path: Path) -> None:
    loaded = megalite.load(stories)
    with pytest.raises(ConfigError) as refused:
        megalite.generate(loaded, PROMPT, tokens=0, temperature=-1.0, top_k=0, top_p=1.5)
    for line in ("tokens: 0 is", "temperature: -1 is", "top_k: 0 is", "top_p: 1.5 is"):
        assert line in str(refused.value)
    with pytest.raises(
        ConfigError, match=r"top_p: has no effect with temperature 0.*; set temperature above 0"
    ):
        megalite.generate(loaded, PROMPT, top_p=0.9)
    with pytest.raises(ConfigError, match=r"tokens: .* exceed model\.max_position_embeddings"):
        megalite.generate(loaded, PROMPT, tokens=10_000)
    with pytest.raises(CheckpointError, match="which has no steps"):
        megalite.load(stories, step=10)
    with pytest.raises(CheckpointError, match="does not exist"):
        megalite.load(tmp_path / "nowhere")


def test_the_names_stay_functions_and_cost_nothing_before_they_are_used() -> None:
    code = (
        "import sys, megalite; assert not {'torch', 'pydantic', 'transformers'} & sys.modules.keys();"
        "from megalite import generate, load; import megalite.generation.loaded;"
        "assert callable(megalite.generate) and callable(megalite.load) and 'generate' in dir(megalite)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
