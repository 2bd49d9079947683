"""Each derived value has an equation, which gives the value that is shown from the numbers that are shown."""

import re
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from megalite.config.output.equations import EQUATIONS, NAME, OPEN, explained_values, explanation
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.toml import setting_lines
from megalite.topology.flops import flops_per_token
from tests.support.parity import about
from tests.unit.config.runs import REMOVED, load

AUTO_WIDTH = {"model.vocab_size": "auto", "tokenizer.vocab_size": 300}
RUNS: dict[str, dict[str, Any]] = {
    "micro batches": AUTO_WIDTH,
    "micro batch size": {"training.micro_batch_size": REMOVED, "training.micro_batches": 2},
    "global batch": {"training.global_batch_size": REMOVED, "training.micro_batches": 3},
    "heads": {"model.num_key_value_heads": REMOVED},
    "layout": {"parallel.tensor": 2, "parallel.pipeline": 2, "training.global_batch_size": 16},
    "context": {"parallel.context": 2, "parallel.data": 2},
    "chunks": {"training.sequence_chunk": 8},
    "two chunks": {
        "parallel.pipeline": 2,
        "parallel.schedule": "interleaved_1f1b",
        "training.micro_batches": 4,
    },
    "equal work": {"parallel.pipeline": 2, "parallel.layers_per_stage": "auto", "model.vocab_size": 300},
    "momentum": {"optimizer.name": "muon", "optimizer.warmup_ratio": 0.25},
    "ZeRO": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 1},
    "warm-up": {"optimizer.warmup_steps": 3, "training.steps": REMOVED, "training.epochs": 2.0},
}


def evaluated(equation: str, numbers: dict[str, Any]) -> Any:
    names = {name: f"number_{place}" for place, name in enumerate(NAME.findall(equation))}
    text = NAME.sub(lambda match: names[match[1]], equation)
    return eval(text, {"__builtins__": {}, "ceil": ceil}, {names[name]: numbers[name] for name in names})


@pytest.mark.parametrize("name", RUNS)
def test_every_equation_gives_its_value(tmp_path: Path, name: str) -> None:
    loaded = load(tmp_path, RUNS[name], world_size=8 if name == "layout" else None)
    explained = {value.key: value for value in explained_values(loaded.config, loaded.origin)}
    for value in explained.values():
        expected = value.value if isinstance(value.value, str) else about(value.value)
        assert evaluated(value.equation, dict(value.numbers)) == expected, value.key
    derived = {key for key, origin in loaded.origins.items() if origin == "derived"}
    assert derived and derived <= explained.keys(), "load_run fills in what has no equation"


def test_every_equation_is_shown_in_some_run(tmp_path: Path) -> None:
    """An equation that no run shows is checked by nothing."""
    shown: set[str] = set()
    for name, changes in RUNS.items():
        loaded = load(tmp_path, changes, world_size=8 if name == "layout" else None)
        shown |= {value.key for value in explained_values(loaded.config, loaded.origin)}
    assert shown == EQUATIONS.keys()


def test_every_setting_that_can_be_auto_or_unset_for_another_is_known() -> None:
    """A new setting with "auto" has to be answered here: by an equation, or by what decides it at the start."""
    automatic = {
        f"{section}.{key}"
        for section, info in RunConfig.model_fields.items()
        for key, field in getattr(info.annotation, "model_fields", {}).items()
        if "'auto'" in str(field.annotation) and not field.is_required()
    }
    # They have a value of their own that means "look", and no number follows.
    choices = {
        "model.kernels",
        "monitor.console",
        "checkpoint.resume",
        "launch.bind_cores",
        "launch.interface",
        "tokenizer.vocab_size",
        "tokenizer.end_of_document",
    }
    assert {"parallel.data", "training.precision"} <= automatic
    assert automatic - choices <= EQUATIONS.keys() | OPEN.keys(), automatic - choices


def test_a_line_has_the_origin_of_each_number(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, RUNS["layout"] | AUTO_WIDTH, world_size=8, flags=["--training.sequence_length", "8"]
    )
    places = setting_lines((tmp_path / "run.toml").read_text())

    def origin(key: str) -> str:
        place = loaded.origin(key)
        return f"{place}:{places[key]}" if place == "run.toml" and key in places else place

    lines = {line.split(" = ")[0]: line for line in explanation(loaded.config, origin)}
    batch, size = places["training.global_batch_size"], places["training.micro_batch_size"]
    tensor, pipeline = places["parallel.tensor"], places["parallel.pipeline"]
    assert lines["training.micro_batches"] == (
        f"training.micro_batches = 4 = global_batch_size 16 (run.toml:{batch}) / (micro_batch_size 2 (run.toml:{size}) "
        f"* data 2 (= ranks 8 / (tensor 2 (run.toml:{tensor}) * context 1 (default) "
        f"* pipeline 2 (run.toml:{pipeline}))))"
    )
    assert lines["tokens a step"].endswith("* sequence_length 8 (--training.sequence_length)")
    assert "weights" not in lines and lines["parameters"].count(" + ") == 2
    source = (tmp_path / "run.toml").read_text().splitlines()
    assert source[batch - 1] == "global_batch_size = 16" and re.match("pipeline = 2", source[pipeline - 1])


def test_numbers_are_those_of_the_run_and_open_settings_are_named(tmp_path: Path) -> None:
    config = load(tmp_path).config
    lines = list(explanation(config, load(tmp_path).origin))
    [flops] = [line for line in lines if line.startswith("FLOPs a token = ")]
    assert f" {flops_per_token(config.shape(300), 16)} = 3 * (" in flops
    assert any(line.startswith("training.precision stays open: ") for line in lines)
    assert not any("warm-up" in line for line in explanation(load(tmp_path, RUNS["warm-up"]).config, str))
