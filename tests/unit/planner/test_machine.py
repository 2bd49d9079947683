"""A run that certainly does not fit this machine is refused before any work, with the setting that takes the memory."""

from pathlib import Path

import pytest

from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError
from megalite.planner import machine as planner_machine
from megalite.planner.machine import least_memory, memory_beyond_any_machine, memory_problems
from megalite.planner.memory import memory_of_stages
from tests.support.parity import about
from tests.unit.config.runs import load

GIB, BASE = 2**30, Path(__file__).parents[1] / "config" / "small_llama"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return the patch that gives this machine 24 GiB and no accelerator."""
    monkeypatch.setattr(planner_machine, "total_memory_bytes", lambda: 24 * GIB)
    monkeypatch.setattr(planner_machine, "has_accelerator", lambda: False)
    return monkeypatch


def run(tmp_path: Path, changes: dict[str, object], ranks: int | None = None) -> RunConfig:
    return load(tmp_path, changes, world_size=ranks).config


LORA = {"adapter.kind": "lora", "adapter.rank": 2_000_000_000, "model": {"weights": str(BASE)}}
TOO_LARGE: dict[str, tuple[dict[str, object], int]] = {
    "model.hidden_size": ({"model.hidden_size": 10**9}, 10**9),
    "model.vocab_size": ({"model.vocab_size": 10**9}, 10**9),
    "model.intermediate_size": ({"model.intermediate_size": 10**9}, 10**9),
    "adapter.rank": (LORA, 2 * 10**9),
    "training.sequence_length": (
        {"training.sequence_length": 10**9, "model.max_position_embeddings": 10**9},
        10**9,
    ),
    "training.micro_batch_size": (
        {
            "training.micro_batch_size": 10**7,
            "training.global_batch_size": 10**7,
            "training.micro_batches": 1,
        },
        10**7,
    ),
}


@pytest.mark.parametrize("key", TOO_LARGE)
def test_the_setting_that_takes_the_memory_is_named_with_both_sizes(tmp_path: Path, key: str) -> None:
    changes, value = TOO_LARGE[key]
    [problem] = memory_problems(run(tmp_path, changes), 1)
    assert problem.key == key and problem.message.startswith(f"{value:,} does not fit: one rank needs ")
    assert problem.message.endswith("this machine has 24.0 GiB") and "parallel.tensor" in problem.remedy


def test_all_ranks_of_one_machine_count_together(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    config = run(tmp_path, {"parallel.data": 4, "training.precision": "fp32"}, 4)
    least = least_memory(config)
    [stage] = memory_of_stages(config, 300)
    batch = config.batch.micro_batch_size * config.training.sequence_length * 4 * (48 + 300)
    assert (least.rank, least.job) == (about(stage.states + batch), about(4 * (stage.states + batch)))
    machine.setattr(planner_machine, "total_memory_bytes", lambda: int(2.5 * least.rank))
    assert not list(memory_problems(config, 2))  # the others run on other machines
    [problem] = memory_problems(config, 4)
    assert "the 4 ranks on one machine need" in problem.message


def test_optimizer_state_on_a_disk_does_not_count(tmp_path: Path) -> None:
    zero: dict[str, object] = {"stage": 3}
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    whole, offloaded = (
        least_memory(run(tmp_path, {"training.precision": "bf16", "deepspeed": {"zero_optimization": each}}))
        for each in (zero, zero | offload)
    )
    assert offloaded.job < 0.7 * whole.job


def test_the_memory_of_cards_is_not_that_of_the_host(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    config = run(tmp_path, {"model.vocab_size": 10**7})
    assert 0.2 * GIB < least_memory(config).job < 24 * GIB
    machine.setattr(planner_machine, "total_memory_bytes", lambda: GIB)
    assert list(memory_problems(config, 1))
    machine.setattr(planner_machine, "has_accelerator", lambda: True)
    assert not list(memory_problems(config, 1))
    assert list(memory_problems(run(tmp_path, {"model.hidden_size": 10**9}), 1))


@pytest.mark.parametrize(("device", "fits"), [("cpu", True), (None, False)])
def test_an_optimizer_on_the_host_lies_beside_weights_on_the_card(
    tmp_path: Path, machine: pytest.MonkeyPatch, device: str | None, fits: bool
) -> None:
    changes: dict[str, object] = {
        "model.vocab_size": 35 * 10**7,
        "training.precision": "bf16",
        "deepspeed": {"zero_optimization": {"stage": 2} | _offload(device)},
    }
    config = run(tmp_path, changes)
    machine.setattr(planner_machine, "total_memory_bytes", lambda: 512 * GIB)
    machine.setattr(planner_machine, "has_accelerator", lambda: True)
    assert 512 * GIB < least_memory(config).rank < (512 + 320) * GIB
    assert (not list(memory_problems(config, 1))) is fits
    machine.setattr(planner_machine, "has_accelerator", lambda: False)
    # The machine that shows a configuration need not be the one that trains.
    assert (not list(memory_beyond_any_machine(config))) is fits
    assert list(memory_problems(config, 1))


def _offload(device: str | None) -> dict[str, object]:
    return {} if device is None else {"offload_optimizer": {"device": device}}


def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.num_hidden_layers: 1000000000 .* less than 10001"):
        load(tmp_path, {"model.num_hidden_layers": 10**9})


@pytest.mark.parametrize(("rank", "noted"), [(48, False), (49, False), (76, False), (77, True)])
def test_a_rank_above_every_matrix_is_noted(tmp_path: Path, rank: int, noted: bool) -> None:
    """The matrices have sides of 48 and 76, so ranks above 48 add nothing."""
    notes = load(tmp_path, LORA | {"adapter.rank": rank}).notes
    shown = [note for note in notes if note.startswith("adapter.rank")]
    assert bool(shown) == (rank > 48)
    assert not shown or "48 at most" in shown[0]
