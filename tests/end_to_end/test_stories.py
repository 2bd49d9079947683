"""A real pretrained model: what transformers makes of its folder is what megalite makes of it, in and out."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megalite import Trainer, load_config
from megalite.cli import convert, generate
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.train.run import TrainingResult
from tests.support.generation import generate_ids as generated
from tests.support.generation import load_model
from tests.support.jobs import training_here
from tests.support.selection import cases
from tests.unit.convert.exporting import our_logits

PROMPT = "Once upon a time"
# Where the text of another model would soon differ, and one that ends in the middle of a word.
PROMPTS = ("Tom had a big dog. One day", "She s")
# shared/data/README.md gives their perplexity, from transformers and from lm-eval.
SENTENCES = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day,"
    " she saw a big red ball.",
    "Tom was a happy boy. He had a big dog. They ran in the park and played all day long.",
)


@pytest.fixture(scope="module")
def source(shared_data: Path) -> Path:
    """The folder as transformers reads it."""
    return shared_data / "stories260K"


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder imported as a run."""
    folder = tmp_path_factory.mktemp("stories")
    assert convert.run(["import", str(source), str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def theirs(source: Path) -> tuple[Any, Any]:
    """Tokenizer and model of transformers, in the attention that ours does not use."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    return AutoTokenizer.from_pretrained(source), model.eval()


def written_by(theirs: tuple[Any, Any], prompt: str, tokens: int) -> tuple[list[int], list[int]]:
    """The prompt's ids and those that greedy search of transformers adds."""
    tokenizer, model = theirs
    inputs = tokenizer(prompt, return_tensors="pt")
    [ids] = model.generate(**inputs, max_new_tokens=tokens, do_sample=False).tolist()
    length = inputs["input_ids"].shape[1]
    return ids[:length], ids[length:]


# After the second a word begins, whose space its tokens alone do not say.
@pytest.mark.parametrize(("prompt", "tensor"), [(PROMPT, 2), ("Once upon", 1)])
def test_the_command_writes_the_text_of_transformers(
    run: Path, theirs: tuple[Any, Any], prompt: str, tensor: int, capfd: pytest.CaptureFixture
) -> None:
    prompt_ids, new_ids = written_by(theirs, prompt, 100)
    arguments = [str(run), "--prompt", prompt, "--tokens", "100", "--tensor", str(tensor)]
    assert generate.run(arguments) == 0
    text = theirs[0].decode(prompt_ids + new_ids, skip_special_tokens=True)
    assert len(text) > 200 and capfd.readouterr().out == text + "\n"


def ids_on_rank(run: Path, layout: Layout, prompts: list[list[int]]) -> list[list[int]]:
    [checkpoint] = (run / "checkpoints").glob("step-*")
    model = load_model(checkpoint, ParallelMesh.over_world(layout) if layout.world_size > 1 else None)
    return [list(generated(model, each, new_tokens=40, stop_ids={2})) for each in prompts]


@pytest.mark.parametrize(
    "layout", cases([Layout(), Layout(tensor=2), Layout(pipeline=2, tensor=2)], core=[Layout(tensor=2)])
)
def test_greedy_ids_are_those_of_transformers(ranks, run, theirs, layout):
    prompts, expected = zip(*(written_by(theirs, prompt, 40) for prompt in PROMPTS), strict=True)
    arguments = {"run": run, "layout": layout, "prompts": list(prompts)}
    if layout.world_size == 1:
        assert ids_on_rank(**arguments) == list(expected)
        return
    for found in ranks.run(ids_on_rank, world_size=layout.world_size, **arguments):
        assert found == list(expected)


def test_perplexity_is_the_published_one(run: Path, theirs: tuple[Any, Any]) -> None:
    [checkpoint] = (run / "checkpoints").glob("step-*")
    stage = load_model(checkpoint).stage
    loss = 0.0
    for text in SENTENCES:
        ids = theirs[0](text, return_tensors="pt")["input_ids"]
        assert ids[0, 0] == 1
        loss += F.cross_entropy(our_logits(stage, ids)[0, :-1], ids[0, 1:], reduction="sum").item()
    words = sum(len(text.split()) for text in SENTENCES)
    sizes_bytes = sum(len(text.encode()) for text in SENTENCES)
    assert round(math.exp(loss / words), 3) == 4.238
    assert round(math.exp(loss / sizes_bytes), 4) == 1.3837
    assert round(loss / sizes_bytes / math.log(2), 4) == 0.4685


def test_what_was_imported_is_exported_to_the_byte(run: Path, source: Path, tmp_path: Path) -> None:
    assert convert.run(["export", str(run), str(tmp_path / "export")]) == 0
    expected = load_file(source / "model.safetensors")
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (source, tmp_path / "export")]
    assert len({tuple(each("".join(SENTENCES))["input_ids"]) for each in tokenizers}) == 1
    read, written = (json.loads((each / "config.json").read_text()) for each in (source, tmp_path / "export"))
    common = read.keys() & written.keys() - {"rope_parameters"}
    assert len(common) > 15 and {key: written[key] for key in common} == {key: read[key] for key in common}


@pytest.fixture
def text(shared_data: Path, tmp_path: Path) -> Path:
    """A play, which the model has never seen, and of which it knows little."""
    lines = (shared_data / "tinyshakespeare" / "input.txt").read_text().splitlines(keepends=True)
    (tmp_path / "held.txt").write_text("".join(lines[900:1000]))
    (tmp_path / "train.txt").write_text("".join(lines[:900]))
    return tmp_path


@pytest.fixture
def in_this_process() -> Iterator[None]:
    with training_here():
        yield


def fine_tuned(weights: str, text: Path, steps: int) -> tuple[TrainingResult, list[float]]:
    """The finished run, and its validation losses before and after."""
    config = load_config(
        None,
        run={"folder": text / "run"},
        model={"weights": weights},
        training={
            "steps": steps,
            "sequence_length": 64,
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "precision": "fp32",
            "threads": 1,
        },
        optimizer={"learning_rate": 2e-3, "warmup_steps": steps // 10},
        tokenizer={"end_of_document": "</s>"},
        data={"source": text / "train.txt", "validation": text / "held.txt"},
        validation={"at_start": True},
    )
    result = Trainer(config).train()
    return result, [record["validation_loss"] for record in result.metrics if "validation_loss" in record]


def test_it_is_fine_tuned_from_its_folder(source: Path, text: Path, in_this_process: None) -> None:
    result, losses = fine_tuned(str(source), text, 30)
    # Far from log(512) = 6.2 of a model that knows nothing: its own weights are where it starts.
    assert len(losses) == 2 and losses[0] < 5.0 and losses[1] < losses[0] - 0.5
    tuned = AutoModelForCausalLM.from_pretrained(result.export)
    before = load_file(source / "model.safetensors")
    assert all(not torch.equal(tensor, before[name]) for name, tensor in tuned.named_parameters())


def test_a_run_starts_from_a_name_of_the_hub(
    source: Path, text: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache has the folder; asking for more would fail, as no test has a network."""
    commit = "89abcdef" * 5
    cached = text / "hub" / "models--org--stories"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / commit).symlink_to(source)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(text / "hub"))
    result, losses = fine_tuned("org/stories", text, 1)
    assert losses[0] < 5.0
    assert f'weights = "org/stories@{commit}"' in (result.folder / "run.toml").read_text()
