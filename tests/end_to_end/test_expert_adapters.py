"""Low-rank adapters of every expert, from a folder of transformers to trained ones: answers, pairs, another layout."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from megalite import Trainer
from megalite.config.sections.schema import RunConfig
from tests.support.fine_tuning import fine_tuning_run
from tests.support.jobs import training_here
from tests.support.parity import FLOAT32_RTOL, assert_close

EXPERT_RANKS: dict[str, Any] = {"data": 2, "expert": 2}
WHOLE_EXPERTS: dict[str, Any] = {"tensor": 2, "expert": 2, "expert_tensor": 1, "sequence": True}


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    with training_here():
        yield


@pytest.fixture
def mixture(shared_data: Path, tmp_path: Path) -> Path:
    """A small Mixtral of five experts with the tokenizer of stories260K."""
    folder, sizes = tmp_path / "mixture", {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = MixtralConfig(
        **sizes, vocab_size=512, num_attention_heads=4, num_key_value_heads=2, num_local_experts=5
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared_data / "stories260K" / name, folder / name)
    return folder


def run_of(shared_data: Path, mixture: Path, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    talks = [
        json.loads(line) for line in (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines()[:24]
    ]
    rows: list[dict[str, str]] = [
        {"prompt": talk["question"][:50], "chosen": talk["answer"][:40], "rejected": talk["answer"][40:90]}
        for talk in talks
    ]
    kind = sections["data"]["kind"]
    if kind == "instruct":
        rows = [{"prompt": row["prompt"], "response": row["chosen"]} for row in rows]
    source = mixture.parent / f"{kind}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, dict[str, Any]] = {
        "model": {"weights": str(mixture)},
        "training": {
            "steps": 4,
            "sequence_length": 96,
            "micro_batch_size": 2,
            "global_batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-3},
        "adapter": {"kind": "lora", "rank": 3},
        "checkpoint": {"every": 2, "keep_last": 5},
    }
    return fine_tuning_run(shared_data, source, folder, given, sections)


def test_a_run_goes_on_in_another_layout_and_its_export_with_pairs(shared_data, mixture, tmp_path):
    """AdamW's moments of every expert's adapter come along: the last steps are those of the run itself."""
    data = {"kind": "instruct", "packing": "none"}
    first = run_of(shared_data, mixture, tmp_path / "run", data=data, parallel=EXPERT_RANKS)
    result = Trainer(first).train()
    losses = [record["loss"] for record in result.metrics if "loss" in record]
    assert len(losses) == 4
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-000004")
    again = run_of(shared_data, mixture, tmp_path / "again", data=data, parallel=WHOLE_EXPERTS)
    resumed = [record["loss"] for record in Trainer(again).train().metrics if "loss" in record]
    assert_close(resumed[-2:], losses[2:], rtol=FLOAT32_RTOL, what="losses behind the checkpoint")
    pairs = run_of(
        shared_data,
        mixture,
        tmp_path / "pairs",
        data={"kind": "preference"},
        adapter={"path": str(result.export)},
        parallel=EXPERT_RANKS,
    )
    preferred = [record["loss"] for record in Trainer(pairs).train().metrics if "loss" in record]
    assert preferred[-1] < preferred[0]
