"""The run file that an import writes: the checkpoint's own model and optimizer, and a command that trains on."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.manifest import WEIGHT, Manifest
from megalite.checkpoint.weights import WeightReader
from megalite.cli import convert
from megalite.config.load import load_run
from megalite.convert.foreign.adamw import MOMENTS
from megalite.convert.foreign.run_file import write_import_run_file
from megalite.convert.foreign.streamed import ImportedRun, write_streamed
from megalite.families.registry import hf_config
from megalite.topology.shape import ModelShape, RopeScaling
from megalite.topology.sharding import TensorSlice
from tests.support.engine_folders import EngineFolder, random_states
from tests.support.jobs import ROOT
from tests.support.tiny import END_OF_DOCUMENT, FAMILY_SHAPES, tiny_corpus, tiny_shape, tiny_tokenizer
from tests.support.waiting import PATIENCE

SCALED = {
    "dynamic": RopeScaling("dynamic", 2.0),
    "yarn": RopeScaling("yarn", 4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5),
    "longrope": RopeScaling(
        "longrope",
        4.0,
        original_max_position_embeddings=16,
        short_factor=(1.0, 1.5, 2.0),
        long_factor=(2.0, 3.0, 4.0),
    ),
}
SHAPES = FAMILY_SHAPES | {
    name: replace(tiny_shape(), rope_scaling=scaling) for name, scaling in SCALED.items()
}
SAID = ("--data.source=text", "--training.steps=9", "--training.sequence_length=8")
BATCH = "--training.global_batch_size=8"


class Zeros(WeightReader):
    block_elements = 1 << 20

    def read(self, state_key: str, name: str, region: TensorSlice) -> torch.Tensor:
        return torch.zeros(region.shape)

    def close(self) -> None:
        pass


def lines_of(folder: Path, shape: ModelShape, **facts: Any) -> list[str]:
    run = ImportedRun(shape, **{"config": {}, "state_keys": (WEIGHT, *MOMENTS), **facts})
    return list(write_import_run_file(write_streamed(folder, run, Zeros()), "bf16"))


def manifest_of(run: Path) -> Manifest:
    checkpoint = find_latest(run / "checkpoints")
    assert checkpoint is not None
    return read_manifest(checkpoint)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_its_model_is_the_checkpoint_s(tmp_path: Path, shape: ModelShape) -> None:
    lines_of(tmp_path, shape)
    config = load_run(tmp_path / "run.toml", [*SAID, BATCH]).config
    assert config.model.shape(0) == shape
    assert config.training.precision == "bf16"


@pytest.mark.parametrize("schedule", ["cosine", "constant", "linear"])
def test_its_optimizer_batch_and_length_are_the_checkpoint_s(tmp_path: Path, schedule: str) -> None:
    known = {
        "name": "adamw",
        "learning_rate": 2e-3,
        "betas": [0.8, 0.97],
        "eps": 1e-7,
        "weight_decay": 0.02,
        "gradient_clipping": 0.0,
        "schedule": schedule,
        "warmup_steps": 3,
        "decay_steps": 20,
        "minimum_ratio": 0.1,
    }
    counters = {"step": 5, "samples": 30, "tokens": 240}
    [_, command] = lines_of(tmp_path, tiny_shape(), config={"optimizer": known}, trainer_state=counters)
    assert command.endswith("--data.source TEXT --training.steps N --tokenizer.path TOKENIZER")
    config = load_run(tmp_path / "run.toml", SAID[:2]).config
    assert config.optimizer.model_dump(mode="json").items() >= known.items()
    assert (config.training.global_batch_size, config.training.sequence_length) == (6, 8)


def test_values_that_no_run_takes_are_comments(tmp_path: Path) -> None:
    lines_of(tmp_path, tiny_shape(), config={"optimizer": {"name": "adamw", "learning_rate": 0.0}})
    text = (tmp_path / "run.toml").read_text()
    assert "\n# learning_rate = 0.0003  (megalite's default" in text and "\n# betas = [0.9, 0.95]" in text
    load_run(tmp_path / "run.toml", [*SAID, BATCH])


def test_a_run_file_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("# mine\n")
    lines = lines_of(tmp_path, tiny_shape())
    assert lines == [
        f"{tmp_path}/run.toml existed before and stays as it is",
        f"next: megalite train {tmp_path}/run.toml",
    ]
    assert (tmp_path / "run.toml").read_text() == "# mine\n"


@pytest.mark.extended
def test_the_printed_command_trains_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of DeepSpeed's engine, of step 7, and two more steps in two ranks."""
    shape, left, run = replace(tiny_shape(layers=1), vocab_size=400), tmp_path / "left", tmp_path / "the run"
    left.mkdir()
    (left / "config.json").write_text(
        json.dumps(hf_config(shape, "float32", {}) | {"attention_dropout": 0.1})
    )
    tiny_tokenizer(left)
    (left / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_DOCUMENT}))
    states = {
        name: {key: values.abs() * 1e-3 for key, values in state.items()}
        for name, state in random_states(shape).items()
    }
    EngineFolder(states, optimizer={"clip_grad": 0.7}).write(left)
    assert convert.run(["import", str(left), str(run)]) == 0
    [printed] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: megalite ")]
    (tmp_path / "text.txt").write_text("".join(tiny_corpus()))
    values = {"TEXT": str(tmp_path / "text.txt"), "N": "9", "LENGTH": "16"}
    words = [values.get(word, word) for word in shlex.split(printed.removeprefix("next: megalite "))]
    before = manifest_of(run).config["optimizer"]
    command = [sys.executable, "-m", "megalite", *words, "--parallel.data", "2"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    after = manifest_of(run)
    assert after.step == 9 and after.trainer_state["samples"] == 72
    assert after.config["optimizer"].items() >= before.items()
    assert before["gradient_clipping"] == 0.7 and after.config["model"]["attention_dropout"] == 0.1
    assert after.model == shape
    assert "differ from the checkpoint" not in result.stdout + result.stderr
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [8, 9]
