"""The settings that lower the memory of a rank: each can be typed, lowers what it says, and is not in use already."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from megalite.config.sections.schema import RunConfig
from megalite.planner.memory import memory_of_stages
from megalite.planner.out_of_memory import activation_remedies, out_of_memory_lines, state_remedies
from tests.unit.config.expert_cases import MIXTURE
from tests.unit.config.runs import load

VOCABULARY = 300
BASE = Path(__file__).parents[1] / "config" / "small_llama"
ZERO = "deepspeed.zero_optimization.stage"
RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "long sequences": {
        "training.sequence_length": 512,
        "training.micro_batch_size": 6,
        "training.global_batch_size": 12,
    },
    "data": {"parallel.data": 2},
    "data and tensor": {"parallel.data": 2, "parallel.tensor": 2},
    "all axes": {"parallel.data": 2, "parallel.tensor": 2, "parallel.pipeline": 2},
    "ZeRO 1": {"parallel.data": 2, ZERO: 1},
    "ZeRO 2": {"parallel.data": 2, ZERO: 2},
    "ZeRO 3": {"parallel.data": 2, ZERO: 3, "parallel.tensor": 2},
    "ZeRO 1 over a pipeline": {"parallel.data": 2, "parallel.pipeline": 2, ZERO: 1},
    "shared heads": {"parallel.data": 2, "parallel.tensor": 8, ZERO: 2},
    "muon": {"parallel.data": 2, "optimizer.name": "muon"},
    "average": {"parallel.data": 2, "optimizer.ema_decay": 0.9, ZERO: 2},
    "clipped values": {"parallel.data": 2, "optimizer.clip_value": 0.1, "optimizer.gradient_clipping": 0.0},
    "compiled": {"training.compile": True, "parallel.data": 2, ZERO: 2},
    "recomputed in part": {"training.recompute": "full", "training.recompute_layers": 1},
    "recomputed": {
        "training.recompute": "full",
        "training.offload_activations": True,
        "model.chunked_loss": 8,
        "training.micro_batch_size": 1,
    },
    "from weights": {"model": {"weights": str(BASE)}, "parallel.data": 2, "parallel.pipeline": 2, ZERO: 1},
    "mixture": {**MIXTURE, "parallel.data": 4, "parallel.tensor": 2},
    "mixture, unequal experts": {**MIXTURE, "parallel.data": 4, "parallel.expert": 4, ZERO: 1},
    "mixture, whole experts": {
        **{**MIXTURE, "parallel.data": 2, "parallel.tensor": 2, "parallel.sequence": True},
        **{"parallel.expert_tensor": 1, "parallel.expert": 2, ZERO: 2},
    },
    "mixture, biases": {
        **{**MIXTURE, "model.router_correction_bias": True, "parallel.data": 2, ZERO: 2},
        "checkpoint.export": False,
    },
    "lora": {
        "model": {"weights": str(BASE)},
        "adapter.kind": "lora",
        "parallel.data": 2,
        "parallel.pipeline": 2,
    },
}


_LAST = ("sequence_chunk", "offload_activations", "sequence_length")


def flags_of(remedy: str) -> list[str]:
    return shlex.split(remedy)


def resolved(folder: Path, changes: dict[str, Any], *flags: str) -> RunConfig:
    return load(folder, changes, flags=flags).config.in_precision("bf16")


@pytest.mark.parametrize("name", RUNS)
def test_every_remedy_can_be_typed_and_changes_the_run(tmp_path: Path, name: str) -> None:
    config = resolved(tmp_path, RUNS[name])
    remedies = [*activation_remedies(config), *state_remedies(config)]
    assert remedies
    for remedy in remedies:
        assert resolved(tmp_path, RUNS[name], *flags_of(remedy)) != config, remedy
    for remedy in activation_remedies(config):
        changed = resolved(tmp_path, RUNS[name], *flags_of(remedy))
        assert changed.batch.global_batch_size == config.batch.global_batch_size


@pytest.mark.parametrize("name", RUNS)
def test_remedies_of_the_state_lower_it(tmp_path: Path, name: str) -> None:
    config = resolved(tmp_path, RUNS[name])
    [before, *_] = memory_of_stages(config, VOCABULARY)
    for remedy in state_remedies(config):
        if "offload" in remedy:
            continue  # the estimate counts what a rank keeps, on the host too
        [after, *_] = memory_of_stages(resolved(tmp_path, RUNS[name], *flags_of(remedy)), VOCABULARY)
        assert after.states < before.states, remedy


def test_settings_in_use_are_not_advised_again(tmp_path: Path) -> None:
    advised = " ".join(activation_remedies(resolved(tmp_path, RUNS["recomputed"])))
    assert advised == "--training.sequence_length 8"
    assert f"--{ZERO} 2" in list(state_remedies(resolved(tmp_path, RUNS["ZeRO 1"])))
    assert f"--{ZERO} 2" not in list(state_remedies(resolved(tmp_path, RUNS["ZeRO 1 over a pipeline"])))
    assert not any(ZERO in each for each in state_remedies(resolved(tmp_path, RUNS["muon"])))


def test_what_takes_more_of_the_card_comes_first(tmp_path: Path) -> None:
    config = resolved(tmp_path, RUNS["all axes"])
    stages = list(memory_of_stages(config, VOCABULARY))
    kinds, first, second = out_of_memory_lines(config, VOCABULARY, 1, int(stages[1].peak))
    assert kinds.startswith("this rank needs by estimate: adamw ") and ", weights " in kinds
    assert ", activations " in kinds and "more than the card" not in kinds
    assert first.startswith("for weights, gradients and optimizer state: ") and second.startswith(
        "for activations"
    )
    kinds, first, _ = out_of_memory_lines(config, VOCABULARY, 1, int(stages[1].peak * 3))
    assert first.startswith(
        "for activations and logits: --parallel.sequence true, or "
        "--training.micro_batch_size 1 --training.micro_batches 4"
    )
    kinds, *_ = out_of_memory_lines(config, VOCABULARY, 1, int(stages[1].peak) - 1)
    assert "which are more than the card has" in kinds
    other, *_ = out_of_memory_lines(config, 10**6, 0, int(stages[1].peak))
    assert other != kinds, "each stage has its own figures"


def test_the_largest_kind_comes_first(tmp_path: Path) -> None:
    """A large vocabulary makes the logits the largest, and then they come first."""
    config = resolved(tmp_path, RUNS["long sequences"])
    kinds, *_ = out_of_memory_lines(config, 10**6, 0, 1e12)
    [largest, *_] = kinds.removeprefix("this rank needs by estimate: ").split(", ")
    assert largest.startswith("logits ")


def test_remedies_come_in_the_order_of_their_cost(tmp_path: Path) -> None:
    changes = RUNS["long sequences"] | {"parallel.tensor": 2}
    names = [
        flags_of(remedy)[0].rpartition(".")[2] for remedy in activation_remedies(resolved(tmp_path, changes))
    ]
    assert names == ["sequence", "micro_batch_size", "chunked_loss", "recompute", *_LAST]
