"""Instruction data, from its file to the trained model: the same losses as a plain loop over transformers' model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from megalite import Trainer
from megalite.cli import main
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.bucket_loader import BucketLoader
from megalite.data.batches.conversation_rows import samples_of
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.files.token_file import TokenFile
from megalite.errors import ConfigError, DataError
from tests.support.fine_tuning import Sections, fine_tuning_run
from tests.support.jobs import training_here
from tests.support.parity import FIGURE_RTOL, FLOAT32_RTOL, assert_close
from tests.support.selection import cases

LENGTH, STEPS, SEQUENCES = 256, 3, 4
RATE = 1e-3


@pytest.fixture
def questions(shared_data: Path, tmp_path: Path) -> Path:
    """A hundred of GSM8K's."""
    file = tmp_path / "questions.jsonl"
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:100]))
    return file


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    with training_here():
        yield


def configured(shared_data: Path, source: Path, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run of questions and answers; `sections` are merged into its settings."""
    given: Sections = {
        "training": {
            "steps": STEPS,
            "sequence_length": LENGTH,
            "micro_batch_size": 1,
            "global_batch_size": SEQUENCES,
        },
        "optimizer": {"learning_rate": RATE},
        "data": {"kind": "instruct", "too_long": "drop"},
    }
    return fine_tuning_run(shared_data, source, folder, given, sections)


def plain_losses(weights: Path, loader: StepLoader | BucketLoader) -> list[float]:
    """The loss of each step of a plain loop: each conversation of the loader's rows by itself."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        batch = loader.step_batch(step * loader.global_batch_size)
        count, total = int((batch.labels != -100).sum()), 0.0
        assert batch.document_ids is not None
        for ids, labels, documents in zip(batch.input_ids, batch.labels, batch.document_ids, strict=True):
            for document in documents.unique():
                mine = documents == document
                if (labels[mine] != -100).any():
                    logits = model(ids[None, mine]).logits[0]
                    loss = F.cross_entropy(logits, labels[mine], reduction="sum") / count
                    loss.backward()
                    total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def loader_of(config: RunConfig, prefix: Path) -> StepLoader | BucketLoader:
    """The batches of the run on one rank, with micro batches of one sequence."""
    file, share, seed = TokenFile.open(prefix), BatchShare(LENGTH, 1, SEQUENCES), config.run.seed
    if config.data.length_buckets:
        return BucketLoader(file, share, buckets=config.data.length_buckets, seed=seed)
    return StepLoader(file, share, SampleOrder(seed), samples_of=samples_of(config.data, seed))


BUCKETS = {"packing": "none", "length_buckets": 3}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"parallel": {"tensor": 2, "pipeline": 2}},
    {"parallel": {"data": 2}, "deepspeed": {"zero_optimization": {"stage": 2}}},
    {"parallel": {"pipeline": 2, "schedule": "zbv", "tensor": 2, "sequence": True}},
    {"parallel": {"pipeline": 2, "data": 2}, "data": {"packing": "concatenate", "too_long": "truncate"}},
    {"parallel": {"pipeline": 2, "data": 2}, "data": BUCKETS},
    {"parallel": {"tensor": 2, "sequence": True, "pipeline": 2, "schedule": "zbv"}, "data": BUCKETS},
    {"parallel": {"data": 2}, "deepspeed": {"zero_optimization": {"stage": 2}}, "data": BUCKETS},
]


@pytest.mark.parametrize("layout", cases(LAYOUTS, core=[LAYOUTS[1], LAYOUTS[4], LAYOUTS[5]]))
def test_the_losses_are_those_of_a_plain_loop(shared_data, questions, tmp_path, layout):
    config = configured(shared_data, questions, tmp_path / "run", **layout)
    result = Trainer(config).train()
    found = [record["loss"] for record in result.metrics if "loss" in record]
    rows = loader_of(config, tmp_path / "run" / "data" / "train")
    expected = plain_losses(shared_data / "stories260K", rows)
    assert len(found) == STEPS and expected[-1] < expected[0]
    if config.data.length_buckets:
        shapes = {rows.step_batch(step * SEQUENCES).labels.shape for step in range(STEPS)}
        assert len(shapes) > 1
        assert result.metrics[-1]["tokens"] == sum(
            rows.step_batch(s * SEQUENCES).labels.numel() for s in range(STEPS)
        )
    assert_close(found, expected, rtol=FLOAT32_RTOL)


def test_the_export_writes_the_prompts_that_were_trained(shared_data, questions, tmp_path):
    result = Trainer(configured(shared_data, questions, tmp_path / "run", training={"steps": 1})).train()
    tokenizer = AutoTokenizer.from_pretrained(result.export)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "How many?"}], tokenize=False)
    assert prompt == "<s>How many?\n"


@pytest.mark.parametrize(
    "layout", [{}, {"parallel": {"tensor": 2, "pipeline": 2}}], ids=["one", "four ranks"]
)
def test_added_tokens_have_rows_that_begin_as_the_mean(shared_data, questions, tmp_path, layout):
    marks = ["<|im_start|>", "<|im_end|>", "<|other|>"]
    result = Trainer(
        configured(
            shared_data,
            questions,
            tmp_path / "run",
            training={"steps": 1, "sequence_length": 512},
            optimizer={"learning_rate": 1e-12},
            tokenizer={"chat_template": "chatml", "add_tokens": marks, "end_of_document": "<|im_end|>"},
            **layout,
        )
    ).train()
    tokenizer = AutoTokenizer.from_pretrained(result.export)
    assert tokenizer.convert_tokens_to_ids(marks) == [512, 513, 514]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False)
    assert [tokenizer(text)["input_ids"].count(id) for id in (512, 513)] == [1, 1]
    model = AutoModelForCausalLM.from_pretrained(result.export, dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(shared_data / "stories260K", dtype=torch.float32)
    rows, given = model.get_input_embeddings().weight, before.get_input_embeddings().weight
    assert rows.shape == (515, 64) and model.config.vocab_size == 515
    assert model.generation_config.eos_token_id == 513
    # An update with such a learning rate changes nothing that float32 holds.
    assert_close(rows[:512], given, rtol=0)
    assert_close(rows[512:], given.mean(dim=0).expand(3, -1), rtol=FIGURE_RTOL)
    file = TokenFile.open(tmp_path / "run" / "data" / "train")
    assert int(((file.tokens == 513) & (file.tokens >= 0)).sum()) == file.num_documents


def test_validation_counts_the_answers_only(shared_data, questions, tmp_path):
    config = configured(
        shared_data, questions, tmp_path / "run", training={"steps": 1}, data={"split": [0.8, 0.2]}
    )
    [record] = [each for each in Trainer(config).train().metrics if "validation_loss" in each]
    file = TokenFile.open(tmp_path / "run" / "data" / "validation")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32)
    total, count = 0.0, 0
    for index in range(file.num_documents):
        tokens = torch.tensor(file.document(index).tolist())
        ids, trained = torch.where(tokens < 0, -1 - tokens, tokens), tokens >= 0
        with torch.no_grad():
            losses = F.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="none")
        total, count = total + losses[trained[1:]].sum().item(), count + int(trained[1:].sum())
    assert file.num_documents > 5
    assert_close(record["validation_loss"], total / count, rtol=FLOAT32_RTOL)


def test_prepared_conversations_train_as_they_are(shared_data, questions, tmp_path):
    first = Trainer(configured(shared_data, questions, tmp_path / "run", training={"steps": 1})).train()
    prefix = tmp_path / "run" / "data" / "train"
    again = configured(
        shared_data, prefix, tmp_path / "again", training={"steps": 1}, data={"document_mask": True}
    )
    assert Trainer(again).train().metrics[0]["loss"] == first.metrics[0]["loss"]


def test_buckets_and_a_curriculum_go_on_where_they_stopped(shared_data, questions, tmp_path):
    lines = questions.read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:30]))
    (tmp_path / "more.jsonl").write_text("".join(lines[30:]))
    options = f"--kind instruct --chat-template plain --sequence-length {LENGTH} --too-long drop --workers 0".split()
    options += ["--tokenizer", str(shared_data / "stories260K"), "--end-of-document", "</s>"]
    for name in ("few", "more"):
        files = ["--source", str(tmp_path / f"{name}.jsonl"), "--output", str(tmp_path / name)]
        assert main(["data", "prepare", *files, *options]) == 0
    parts = [{"source": str(tmp_path / name), "weight": 1.0} for name in ("few", "more")]
    curriculum = [{"step": 2, "weights": [3.0, 1.0]}, {"step": 4, "weights": [0.0, 1.0]}]
    blend = {"source": None, "blend": parts, "curriculum": curriculum}

    def run(folder: str, steps: int, data: dict[str, Any]) -> list[float]:
        planned = [each for each in data.get("curriculum", ()) if each["step"] <= steps]
        given = {"training": {"steps": steps}, "checkpoint": {"export": False}}
        given["data"] = data | ({"curriculum": planned} if planned else {})
        result = Trainer(configured(shared_data, tmp_path / "more", tmp_path / folder, **given)).train()
        return [each["loss"] for each in result.metrics if "loss" in each]

    for name, data in (("buckets", BUCKETS), ("blend", blend)):
        whole, first, both = (run(*of, data) for of in ((name, 4), (f"{name}-2", 2), (f"{name}-2", 4)))
        assert both == whole and first == whole[:2] and len(set(whole)) == 4
    moved = {**blend, "curriculum": [{"step": 3, "weights": [3.0, 1.0]}]}
    with pytest.raises(ConfigError, match=r"the weights up to step 4 are not those of .*step-000004"):
        run("blend", 9, moved)


def test_a_bad_line_ends_the_run_before_it_starts_and_leaves_nothing_half_written(
    shared_data, questions, tmp_path
):
    lines = questions.read_text().splitlines()
    lines[41] = json.dumps({"question": "How many?", "answer": " "})
    questions.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"questions.jsonl, line 42: .*answer.*empty"):
        Trainer(configured(shared_data, questions, tmp_path / "run")).train()
    assert not list((tmp_path / "run" / "data").glob("*"))
