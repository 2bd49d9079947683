"""The first lines of a run: the facts that people ask for, before torch is imported."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.train import start
from tests.unit.config.runs import load


def test_the_start_block_has_the_facts_of_the_run(tmp_path: Path) -> None:
    config = load(tmp_path).config
    lines = list(start.start_lines(config, None, threads=1))
    inner = 4 * (48 * 96 + 48 * 48 + 3 * 48 * 76 + 2 * 48) + 48
    assert lines[0].startswith("megalite ")
    assert lines[1:] == [
        "  model       llama, 4 layers of 48, 8 heads (4 key-value), vocabulary 300",
        f"  parameters  {inner + 2 * 300 * 48:,} ({inner:,} without embedding and head)",
        "  processes   1 process on this machine, 1 thread",
        "  layout      tensor 1 x pipeline 1 x data 1",
        "  batch       128 tokens: 8 sequences of 16 (micro batch 2 x 4)",
        "  length      10 steps, 1,280 tokens",
        "  precision   auto",
        "  run folder  runs/default",
    ]


def test_the_context_line_has_the_method_and_its_reason(tmp_path: Path) -> None:
    changes = {"parallel.context": 4, "parallel.data": 1}
    config = load(tmp_path, changes, world_size=4).config
    [line] = (line for line in start.start_lines(config, None, 1) if line.startswith("  context"))
    assert line.split(maxsplit=1)[1] == (
        "4 ranks with 4 positions each, ulysses: 8 heads divide, and a token sends 216 values a layer, 288 by gather"
    )
    config = load(tmp_path, changes | {"parallel.context_method": "ring"}, world_size=4).config
    [line] = (line for line in start.start_lines(config, None, 1) if line.startswith("  context"))
    assert "ring: as set; auto is ulysses: 8 heads divide" in line


def test_hosts_stages_and_shares_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "parallel.tensor": 2,
        "parallel.pipeline": 2,
        "tokenizer": {"path": "tok"},
        "training.steps": None,
        "training.epochs": 2,
        "deepspeed": {"zero_optimization": {"stage": 1}},
    }
    config = load(tmp_path, changes, world_size=8).config
    info = SimpleNamespace(rank=0, world_size=8, hosts=2, launcher="torchrun")
    lines = dict(line.strip().split("  ", 1) for line in list(start.start_lines(config, info, 3))[1:])  # type: ignore[arg-type]
    facts = {name: fact.strip() for name, fact in lines.items()}
    assert facts["processes"] == "8 processes on 2 hosts, started by torchrun, 3 threads each"
    monkeypatch.setenv("MEGALITE_COORDINATOR", "10.0.0.1:29500/ab12")
    again = list(start.start_lines(config, info, 3))  # type: ignore[arg-type]
    assert "  processes   8 processes on 2 hosts, started by megalite launch, 3 threads each" in again
    assert facts["layout"] == "tensor 2 x pipeline 2 x data 2, schedule 1f1b, ZeRO 1"
    given = load(tmp_path, changes | {"parallel.layers_per_stage": [3, 1]}, world_size=8).config
    layout = next(line for line in start.start_lines(given, info, 3) if "layout" in line)  # type: ignore[arg-type]
    assert layout.endswith("schedule 1f1b, layers of each stage 3, 1, ZeRO 1")
    assert facts["batch"].endswith("(micro batch 2 x 2 x data 2)")
    assert facts["length"] == "2 epochs"
    assert facts["parameters"].endswith("without embedding and head, whose size is the tokenizer's")
    assert facts["model"].endswith("the tokenizer's vocabulary")


def test_the_data_line_has_the_steps_of_an_epoch(tmp_path: Path) -> None:
    config = load(tmp_path).config
    line = start.data_line(config, samples=20, held_out=3, steps=10)
    assert line == (
        "data: 20 sequences of 16 tokens, 3 steps per epoch; 10 steps are 4 epochs; validation on 3 sequences"
    )
    assert start.data_line(config, samples=8, held_out=0, steps=1).endswith(
        "1 step per epoch; 1 step is 1 epochs"
    )


def test_a_step_that_reads_the_data_many_times_is_noted(tmp_path: Path) -> None:
    changes = {"training.micro_batches": 4000, "training.global_batch_size": 8000}
    config = load(tmp_path, changes).config
    [_, note] = start.data_line(config, samples=4, held_out=0, steps=1).splitlines()
    assert note == (
        "note: each step reads the data 2,000 times: training.global_batch_size = 8,000, and the data has 4 sequences"
    )
    assert "\n" not in start.data_line(config, samples=4001, held_out=0, steps=1)
