"""Preference data, from its file to the trained model: the losses of the published formula on transformers' logits."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from megalite import Trainer
from megalite.cli import main
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.conversation_rows import samples_of
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.files.token_file import TokenFile
from megalite.data.files.trained_tokens import ids_of, is_trained
from megalite.errors import CheckpointError, DataError
from tests.support.fine_tuning import Sections, fine_tuning_run
from tests.support.jobs import training_here
from tests.support.parity import FIGURE_RTOL, FLOAT32_RTOL, assert_close
from tests.support.selection import cases

LENGTH, STEPS, ROWS, BETA = 96, 3, 8, 0.5
RATE = 1e-4


@pytest.fixture
def pairs(shared_data: Path, tmp_path: Path) -> Path:
    """Thirty questions of GSM8K, with the beginnings of their answers and of others in capitals; some are too long."""
    file = tmp_path / "pairs.jsonl"
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines()[:30]
    talks = [json.loads(line) for line in lines]
    rows = [
        {
            "prompt": talk["question"][:60],
            "chosen": talk["answer"][: 40 + 3 * index],
            "rejected": talks[index - 7]["answer"][:70].upper(),
        }
        for index, talk in enumerate(talks)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    with training_here():
        yield


def configured(shared_data: Path, source: Path, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run of pairs; `sections` are merged into its settings."""
    given: Sections = {
        "training": {
            "steps": STEPS,
            "sequence_length": LENGTH,
            "micro_batch_size": 2,
            "global_batch_size": ROWS,
        },
        "optimizer": {"learning_rate": RATE},
        "data": {"kind": "preference"},
        "preference": {"beta": BETA},
    }
    return fine_tuning_run(shared_data, source, folder, given, sections)


def log_probabilities(model: torch.nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The summed log-probability of each row's answer under transformers' model, and the answer's tokens."""
    sums, counts = [], []
    for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
        answer = labels != -100
        logs = model(ids[None]).logits[0].log_softmax(dim=-1)
        sums.append(logs[answer].gather(1, labels[answer, None]).sum())
        counts.append(answer.sum())
    return torch.stack(sums), torch.stack(counts)


def dpo(policy: Tensor, reference: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """trl's sigmoid loss of each pair, and its reward margin; chosen rows come first."""
    chosen, rejected = (policy[::2] - reference[::2]), (policy[1::2] - reference[1::2])
    margin = BETA * chosen - BETA * rejected
    return -F.logsigmoid(margin), margin


def smoothed(policy: Tensor, reference: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """trl's sigmoid loss with label_smoothing = 0.25."""
    _, margin = dpo(policy, reference, counts)
    return -F.logsigmoid(margin) * 0.75 - F.logsigmoid(-margin) * 0.25, margin


def ipo(policy: Tensor, reference: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """trl's ipo loss: log-probabilities are means over the tokens of an answer."""
    policy, reference = policy / counts, reference / counts
    ratios = (policy[::2] - policy[1::2]) - (reference[::2] - reference[1::2])
    return (ratios - 1 / (2 * BETA)) ** 2, BETA * ratios


def plain_run(weights: Path, loader: StepLoader, formula: Callable[..., tuple[Tensor, Tensor]]) -> list[Any]:
    """The loss, reward accuracy, reward margin and size of the rewards of each step of a plain loop.

    The reference is a copy of the model. A margin is a difference of rewards, and has their rounding.
    """
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    reference = deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    steps = []
    for step in range(STEPS):
        batch = loader.step_batch(step * loader.global_batch_size)
        with torch.no_grad():
            before, _ = log_probabilities(reference, batch)
        policy, counts = log_probabilities(model, batch)
        losses, margins = formula(policy, before, counts)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reward = BETA * policy.abs().mean().item()
        steps.append(
            (losses.mean().item(), (margins > 0).float().mean().item(), margins.mean().item(), reward)
        )
    return steps


def loader_of(config: RunConfig, folder: Path) -> StepLoader:
    return StepLoader(
        TokenFile.open(folder / "data" / "train"),
        BatchShare(LENGTH, 2, ROWS // 2),
        SampleOrder(config.run.seed, together=2),
        samples_of=samples_of(config.data, config.run.seed),
    )


LAYOUTS: list[tuple[dict[str, Any], Callable[..., Any]]] = [
    ({}, dpo),
    (
        {"parallel": {"pipeline": 2, "tensor": 2}, "preference": {"beta": BETA, "label_smoothing": 0.25}},
        smoothed,
    ),
    ({"parallel": {"data": 2}, "deepspeed": {"zero_optimization": {"stage": 2}}}, dpo),
    ({"preference": {"beta": BETA, "loss": "ipo"}}, ipo),
    ({"parallel": {"pipeline": 2, "schedule": "zbv"}}, dpo),
]


@pytest.mark.parametrize(
    ("sections", "formula"),
    cases(LAYOUTS, core=LAYOUTS[1:2]),
)
def test_the_losses_are_those_of_the_published_formula(shared_data, pairs, tmp_path, sections, formula):
    config = configured(shared_data, pairs, tmp_path / "run", **sections)
    records = [record for record in Trainer(config).train().metrics if "loss" in record]
    expected = plain_run(shared_data / "stories260K", loader_of(config, tmp_path / "run"), formula)
    found = [[record[key] for key in ("loss", "reward_accuracy", "reward_margin")] for record in records]
    assert len(found) == STEPS and expected[-1][2] > 0.01
    assert_close([each[0] for each in found], [each[0] for each in expected], rtol=FLOAT32_RTOL)
    # The rewards of the first step are zero, but for rounding.
    assert_close([each[1] for each in found[1:]], [each[1] for each in expected[1:]], rtol=FIGURE_RTOL)
    for (*_, margin), (*_, wanted, size) in zip(found, expected, strict=True):
        assert_close(size + margin, size + wanted, rtol=FLOAT32_RTOL)


@pytest.mark.extended
def test_an_adapter_is_switched_off_for_the_reference(shared_data, pairs, tmp_path):
    """The model without its adapter is the same reference as the model at its start."""
    adapter = {"kind": "lora", "rank": 4, "dropout": 0.2}
    rate = {"learning_rate": 1e-3}
    config = configured(shared_data, pairs, tmp_path / "run", adapter=adapter, optimizer=rate)
    first = Trainer(config).train()
    assert not (tmp_path / "run" / "reference.json").exists()
    losses = [record["loss"] for record in first.metrics if "loss" in record]
    margins = [record["reward_margin"] for record in first.metrics if "loss" in record]
    assert margins[-1] > 0.01 and losses[-1] < losses[0]
    # The model has no biases, so the same weights are trained.
    biased = {**adapter, "bias": "all"}
    config = configured(shared_data, pairs, tmp_path / "other", adapter=biased, optimizer=rate)
    second = Trainer(config).train()
    assert (tmp_path / "other" / "reference.json").exists()
    assert_close([record["loss"] for record in second.metrics if "loss" in record], losses, rtol=FLOAT32_RTOL)


@pytest.mark.extended
def test_validation_has_the_preferences_of_held_out_pairs(shared_data, pairs, tmp_path):
    config = configured(shared_data, pairs, tmp_path / "run", data={"split": [0.7, 0.3]})
    [record] = [each for each in Trainer(config).train().metrics if "validation_loss" in each]
    file = TokenFile.open(tmp_path / "run" / "data" / "validation")
    model, before = (
        AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64)
        for weights in (tmp_path / "run" / "export", shared_data / "stories260K")
    )
    margins = []
    for index in range(0, file.num_documents, 2):
        rewards = []
        for tokens in map(file.document, (index, index + 1)):
            ids, trained = torch.tensor(ids_of(tokens)).long(), torch.tensor(is_trained(tokens))[1:]
            with torch.no_grad():
                here, there = (
                    F.cross_entropy(each(ids[None, :-1]).logits[0], ids[1:], reduction="none")[trained].sum()
                    for each in (model, before)
                )
            rewards.append(BETA * (there - here))
        margins.append(rewards[0] - rewards[1])
    found = torch.stack(margins)
    assert 3 < len(margins) < 20 and record["validation_pairs"] == len(margins)
    assert "validation_perplexity" not in record
    # The relative error of so small a loss is the absolute one of its margin, about the negative logarithm.
    assert_close(math.log(record["validation_loss"]), (-F.logsigmoid(found).mean()).log(), rtol=FLOAT32_RTOL)
    assert_close(record["validation_reward_accuracy"], (found > 0).float().mean(), rtol=FIGURE_RTOL)


@pytest.mark.extended
def test_a_resumed_run_has_the_reference_of_its_start(shared_data, pairs, tmp_path, capsys):
    whole = Trainer(configured(shared_data, pairs, tmp_path / "whole")).train()
    Trainer(configured(shared_data, pairs, tmp_path / "run", training={"steps": 1})).train()
    rest = Trainer(configured(shared_data, pairs, tmp_path / "run")).train()
    assert "read from" in capsys.readouterr().out
    losses = [[each["loss"] for each in run.metrics if "loss" in each] for run in (rest, whole)]
    assert len(losses[0]) == STEPS and losses[0] == losses[1]
    file = tmp_path / "run" / "reference.json"
    whole_text, content = file.read_text(), json.loads(file.read_text())
    content["losses"][0][0] += 1.0
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"its losses are not those of the steps before .*step-0000"):
        Trainer(configured(shared_data, pairs, tmp_path / "run", training={"steps": STEPS + 1})).train()
    file.write_text(whole_text[:-9])
    with pytest.raises(CheckpointError, match=r"reference.json is missing or of other data.*start over"):
        Trainer(configured(shared_data, pairs, tmp_path / "run", training={"steps": STEPS + 1})).train()


@pytest.mark.extended
def test_other_weights_have_another_reference(shared_data, pairs, tmp_path, capsys):
    """A run that starts over reads the file if the weights are the same, wherever they lie, and only then."""
    once = {"training": {"steps": 1}, "checkpoint": {"resume": "never"}}
    Trainer(configured(shared_data, pairs, tmp_path / "run", **once)).train()
    capsys.readouterr()
    copied = tmp_path / "copied"
    shutil.copytree(shared_data / "stories260K", copied, copy_function=shutil.copyfile)
    Trainer(configured(shared_data, pairs, tmp_path / "run", model={"weights": str(copied)}, **once)).train()
    assert "read from" in capsys.readouterr().out
    other = {"weights": str(tmp_path / "run" / "export")}
    config = configured(
        shared_data,
        pairs,
        tmp_path / "run",
        model=other,
        training={"steps": 1},
        checkpoint={"resume": "never", "export": False},
    )
    Trainer(config).train()
    assert "pairs, computed in" in capsys.readouterr().out


def test_a_bad_line_ends_the_run_before_it_starts_and_leaves_nothing_half_written(
    shared_data, pairs, tmp_path
):
    lines = pairs.read_text().splitlines()
    lines[11] = json.dumps({"prompt": "How many?", "chosen": "Two.", "rejected": "Two."})
    pairs.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"pairs.jsonl, line 12: chosen and rejected are equal"):
        Trainer(configured(shared_data, pairs, tmp_path / "run")).train()
    assert not list((tmp_path / "run" / "data").glob("*"))


def test_pairs_prepared_ahead_train_as_the_run_s_own(shared_data, pairs, tmp_path, capsys):
    config = configured(shared_data, pairs, tmp_path / "run", training={"steps": 1})
    first = Trainer(config).train()
    prefix = tmp_path / "ahead" / "pairs"
    shown = [
        "--tokenizer",
        str(shared_data / "stories260K"),
        "--end-of-document",
        "</s>",
        "--workers",
        "0",
    ]
    chat = ["--kind", "preference", "--chat-template", "plain", "--sequence-length", str(LENGTH)]
    assert main(["data", "prepare", "--source", str(pairs), "--output", str(prefix), *shown, *chat]) == 0
    assert "60 answers (43 longer ones cut)" in capsys.readouterr().out
    again = configured(shared_data, prefix, tmp_path / "again", training={"steps": 1})
    assert Trainer(again).train().metrics[0]["loss"] == first.metrics[0]["loss"]
    own, ahead = (TokenFile.open(each) for each in (tmp_path / "run" / "data" / "train", prefix))
    assert own.tokens.tolist() == ahead.tokens.tolist()
