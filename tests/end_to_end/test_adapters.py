"""Adapters, from PEFT's folder to a trained one and back: PEFT's own losses, weights and logits."""

import json
import runpy
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import megalite
from megalite import Trainer
from megalite.cli import convert
from megalite.config.sections.schema import RunConfig
from megalite.convert.huggingface.export import export
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.conversation_rows import samples_of
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.files.token_file import TokenFile
from megalite.errors import CheckpointError, ConfigError
from megalite.generation.source import find_source
from megalite.topology.parameters import parameter_count, trained_tensors
from tests.support.fine_tuning import Sections, fine_tuning_run
from tests.support.generation import generate_ids
from tests.support.jobs import ROOT, training_here
from tests.support.parity import FLOAT32_RTOL, assert_close, assert_same_tensors
from tests.support.selection import cases

LENGTH, STEPS, SEQUENCES, RATE = 256, 3, 4, 0.05
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    with training_here():
        yield


@pytest.fixture
def questions(shared_data: Path, tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:60]))
    return file


def base_model(shared_data: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(shared_data / "stories260K", dtype=torch.float32)


def adapter_of_peft(shared_data: Path, folder: Path, **options: Any) -> Path:
    """Save an adapter whose B is not zero, as one that was trained."""
    torch.manual_seed(3)
    if "num_virtual_tokens" in options:
        model = get_peft_model(base_model(shared_data), PrefixTuningConfig(task_type="CAUSAL_LM", **options))
        model.save_pretrained(folder)
        return folder
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM", **options)
    model = get_peft_model(base_model(shared_data), config)
    for name, tensor in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(tensor, std=0.05)
    model.save_pretrained(folder)
    return folder


def configured(shared_data: Path, source: Path, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run of questions and answers; `sections` are merged into its settings."""
    given: Sections = {
        "training": {
            "steps": STEPS,
            "sequence_length": LENGTH,
            "micro_batch_size": 1,
            "global_batch_size": SEQUENCES,
        },
        "optimizer": {"name": "sgd", "learning_rate": RATE},
        "data": {"kind": "instruct", "too_long": "drop", "packing": "none"},
    }
    return fine_tuning_run(shared_data, source, folder, given, sections)


def trained_by_peft(model: PreTrainedModel, config: RunConfig, folder: Path) -> list[float]:
    """Train an adapter with PEFT and plain SGD on the rows of our loader; save it and return the losses."""
    loader = StepLoader(
        TokenFile.open(Path(config.run.folder) / "data" / "train"),
        BatchShare(LENGTH, 1, SEQUENCES),
        SampleOrder(config.run.seed),
        samples_of=samples_of(config.data, config.run.seed),
    )
    prefix = config.adapter.kind == "prefix"
    adapted = PeftModel.from_pretrained(model, config.adapter.path, is_trainable=not prefix)
    if prefix:  # which PEFT opens for inference only
        adapted.prompt_encoder.requires_grad_(True)
    trained = [each for each in adapted.parameters() if each.requires_grad]
    losses = []
    for step in range(STEPS):
        batch = loader.step_batch(step * SEQUENCES)
        labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
        logits = adapted(input_ids=batch.input_ids, attention_mask=torch.ones_like(batch.input_ids)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        with torch.no_grad():
            for tensor in trained:
                tensor -= RATE * tensor.grad
                tensor.grad = None
        losses.append(loss.item())
    adapted.save_pretrained(folder)
    return losses


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_rslora": True, "use_dora": True, "modules_to_save": ["model.norm"]},
    {"num_virtual_tokens": 5},
]
LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"tensor": 2, "pipeline": 2, "sequence": True}},
    {"parallel": {"data": 2}, "deepspeed": {"zero_optimization": {"stage": 3}}},
    {},
]


@pytest.mark.parametrize("variant", cases(VARIANTS, core=VARIANTS), ids=["lora", "dora", "prefix"])
@pytest.mark.parametrize("layout", cases(LAYOUTS, core=LAYOUTS[:1]), ids=["tp2-pp2", "zero3", "alone"])
def test_an_adapter_of_peft_goes_on_as_with_peft(shared_data, questions, tmp_path, layout, variant):
    folder = adapter_of_peft(shared_data, tmp_path / "begun", **variant)
    config = configured(shared_data, questions, tmp_path / "run", adapter={"path": str(folder)}, **layout)
    result = Trainer(config).train()
    ours = [record["loss"] for record in result.metrics if "loss" in record]
    theirs = trained_by_peft(base_model(shared_data), config, tmp_path / "theirs")
    assert_close(ours, theirs, rtol=FLOAT32_RTOL)
    assert_same_tensors(tensors_of(result.export), tensors_of(tmp_path / "theirs"), rtol=FLOAT32_RTOL)
    begun = tensors_of(folder)
    assert all(not torch.equal(begun[name], each) for name, each in tensors_of(result.export).items())


def test_adapter_export_merged_model_and_checkpoint_give_the_same_logits(
    shared_data, questions, tmp_path, capsys
):
    adapter = {"kind": "lora", "rank": 4, "targets": ["q_proj", "o_proj", "up_proj"], "dora": True}
    result = Trainer(configured(shared_data, questions, tmp_path / "run", adapter=adapter)).train()
    ids = torch.arange(40).unsqueeze(0) % 512
    opened = PeftModel.from_pretrained(base_model(shared_data), result.export).eval()
    theirs = opened(input_ids=ids).logits.detach()
    whole = export(result.checkpoint, tmp_path / "merged", result.export).folder
    merged = AutoModelForCausalLM.from_pretrained(whole)(input_ids=ids).logits.detach()
    plain = base_model(shared_data)(input_ids=ids).logits.detach()
    assert (theirs - plain).abs().max() > 0.05
    assert (
        convert.run(["inspect", str(result.export)]) == 0 == convert.run(["inspect", str(tmp_path / "run")])
    )
    said = capsys.readouterr().out
    assert (
        "an adapter in PEFT's format" in said
        and f"the weights of {(shared_data / 'stories260K').resolve()}" in said
    )
    with pytest.raises(CheckpointError, match="holds an adapter, not the weights of a model"):
        convert.run(["universal", str(tmp_path / "run"), str(tmp_path / "universal")])
    for found in (
        merged,
        megalite.load(result.checkpoint).logits(ids),
        megalite.load(result.export).logits(ids),
    ):
        assert_close(found, theirs, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("projection", [None, 24])
def test_a_prefix_opens_in_peft_and_generates(shared_data, questions, tmp_path, projection):
    adapter = {"kind": "prefix", "tokens": 6} | ({} if projection is None else {"projection": projection})
    result = Trainer(configured(shared_data, questions, tmp_path / "run", adapter=adapter)).train()
    ids = torch.arange(40).unsqueeze(0) % 512
    opened = PeftModel.from_pretrained(base_model(shared_data), result.export).eval()
    theirs = opened(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.detach()
    loaded = megalite.load(result.checkpoint)
    for model in (loaded, megalite.load(result.export)):
        assert_close(model.logits(ids), theirs, rtol=FLOAT32_RTOL)
    prompt = torch.tensor([loaded.tokenizer.backend.encode("Once upon a time").ids])
    grown = prompt
    for _ in range(8):
        grown = torch.cat((grown, opened(input_ids=grown).logits[:, -1:].argmax(-1)), dim=1)
    written = list(generate_ids(loaded.replica, prompt[0].tolist(), new_tokens=8))
    assert written == grown[0, prompt.shape[1] :].tolist()
    with pytest.raises(CheckpointError, match="a prefix cannot be merged"):
        export(result.checkpoint, tmp_path / "merged", None)


def test_only_the_adapter_is_saved_and_it_resumes_in_another_layout(shared_data, questions, tmp_path):
    settings: dict[str, dict[str, Any]] = {
        "adapter": {"kind": "lora", "rank": 4, "dropout": 0.1, "modules_to_save": ["model.norm"]},
        "optimizer": {"learning_rate": 0.01},
    }
    whole = Trainer(configured(shared_data, questions, tmp_path / "whole", **settings)).train()
    run, begun = tmp_path / "run", {"training": {"steps": 2}, "parallel": {"tensor": 2}}
    half = Trainer(configured(shared_data, questions, run, **settings, **begun)).train()
    sizes = [each.stat().st_size for each in half.checkpoint.glob("*.safetensors")]
    weights = (shared_data / "stories260K" / "model.safetensors").stat().st_size
    assert sum(sizes) < weights / 3
    resumed = Trainer(configured(shared_data, questions, run, **settings, parallel={"pipeline": 2})).train()
    losses = [record["loss"] for record in resumed.metrics if "loss" in record]
    assert_close(losses[-1:], [whole.metrics[-1]["loss"]], rtol=FLOAT32_RTOL)
    assert_same_tensors(tensors_of(resumed.export), tensors_of(whole.export), rtol=FLOAT32_RTOL)


def test_another_base_is_refused(shared_data, questions, tmp_path):
    adapter = {"kind": "lora", "rank": 4}
    run = configured(shared_data, questions, tmp_path / "run", adapter=adapter, training={"steps": 1})
    result = Trainer(run).train()
    other = tmp_path / "other"
    model = base_model(shared_data)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 0.01
    model.save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_data / "stories260K" / name, other)
    with pytest.raises(CheckpointError, match=r"does not hold the weights .* --base FOLDER"):
        find_source(result.checkpoint, base=other)
    with pytest.raises(CheckpointError, match=r"does not hold the weights .* --base FOLDER"):
        find_source(result.export, base=other)
    changed = configured(
        shared_data, questions, tmp_path / "run", adapter=adapter, model={"weights": str(other)}
    )
    with pytest.raises(CheckpointError, match=r"is of an adapter of other weights .* set model.weights"):
        Trainer(changed).train()


def test_a_file_that_is_not_the_adapter_of_the_settings_is_refused(shared_data, questions, tmp_path):
    folder = adapter_of_peft(shared_data, tmp_path / "begun")
    settings = {"path": str(folder), "targets": ["q_proj"]}
    with pytest.raises(CheckpointError, match=r"has .*which \[adapter\] does not train; delete the settings"):
        Trainer(configured(shared_data, questions, tmp_path / "run", adapter=settings)).train()
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | {"rank_pattern": {"q_proj": 8}}))
    with pytest.raises(ConfigError, match="rank_pattern"):
        configured(shared_data, questions, tmp_path / "run", adapter={"path": str(folder)})


def test_a_trained_copy_of_a_tied_embedding_is_refused(shared_data, tmp_path):
    folder = adapter_of_peft(shared_data, tmp_path / "begun", modules_to_save=["embed_tokens"])
    with pytest.raises(
        CheckpointError, match=r"its own embed_tokens, but the base ties .* merge it with PEFT"
    ):
        megalite.load(folder, base=shared_data / "stories260K")


@pytest.mark.extended
def test_the_example_shows_that_one_percent_of_the_values_reaches_most_of_it(
    shared_data, questions, tmp_path
):
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines(keepends=True)
    questions.write_text("".join(each for each in lines[:2000] if len(each) < 330))
    example = runpy.run_path(str(ROOT / "examples" / "fine-tuning" / "compare.py"))
    flags = {
        "model.weights": shared_data / "stories260K",
        "tokenizer.end_of_document": "</s>",
        "run.folder": tmp_path / "runs",
        "data.source": questions,
        "data.too_long": "drop",
        "training.steps": 30,
        "training.sequence_length": 200,
        "training.micro_batch_size": 8,
        "training.global_batch_size": 8,
    }
    rows = example["main"]([text for key, value in flags.items() for text in (f"--{key}", str(value))])
    full, lora, prefix = rows
    gained = full["before"] - full["after"]
    assert gained > 1 and prefix["after"] < prefix["before"]
    assert lora["before"] == full["before"] and lora["before"] - lora["after"] > 0.5 * gained
    shape = find_source(tmp_path / "runs" / "lora").shape
    assert sum(map(prod, trained_tensors(shape).values())) < 0.01 * parameter_count(shape.base)
