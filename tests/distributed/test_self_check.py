"""All copies of a tensor stay equal bit by bit in training, and one flipped bit is found and its rank named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.train.step.self_check import cause, compare_copies
from tests.support.tiny_run import ranks_of, tiny_trainer, write_token_files

NORM, WEIGHT = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.down_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
MIXTURE = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 24}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp3": {"parallel.data": 3, "training.global_batch_size": 3},
    "dp2-tp2": {"parallel.data": 2, "parallel.tensor": 2},
    "tp4": {"parallel.tensor": 4, "parallel.sequence": "true"},
    "pp2-dp2": {"parallel.pipeline": 2, "parallel.data": 2, "model.tie_word_embeddings": "true"},
    "cp2-bf16": {"parallel.context": 2, "training.precision": "bf16"},
    "zero1-dp2-tp2": {"parallel.data": 2, "parallel.tensor": 2, "deepspeed.zero_optimization.stage": 1},
    "zero2-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 2},
    "muon-dp2-tp2": {"parallel.data": 2, "parallel.tensor": 2, "optimizer.name": "muon"},
    "dp4-ep2": {"parallel.data": 4, "parallel.expert": 2, **MIXTURE},
}
# Layout, tensor, rank that is hit, the ranks that can be named.
FLIPS = {
    "dp3": (WEIGHT, 1, "rank 1 (pp 0, dp 1, tp 0)"),
    "dp2-tp2": (NORM, 3, "rank 3 (pp 0, dp 1, tp 1)"),
    "tp4": (NORM, 2, "rank 2 (pp 0, dp 0, tp 2), where"),
    "pp2-dp2": (WEIGHT, 3, "rank 2 (pp 1, dp 0, tp 0), rank 3"),
    "zero1-dp2-tp2": (NORM, 1, "rank 1 (pp 0, dp 0, tp 1)"),
    "dp4-ep2": (EXPERT, 3, "rank 1 (pp 0, dp 1, tp 0), rank 3"),
}


def train(folder: Path, changes: dict[str, Any], hit: tuple[str, int, str] | None = None) -> str:
    """Train three steps on one rank with a comparison after each; before the last one, one bit is flipped."""
    trainer, _ = tiny_trainer(folder, changes)
    for step in range(3):
        trainer.train_step()
        if step == 2 and hit is not None and trainer.mesh.rank == hit[1]:
            _flip(trainer, hit[0])
        if difference := compare_copies(trainer):
            return str(cause(difference, trainer, None))
    return ""


def _flip(trainer: Any, name: str) -> None:
    for parameter in trainer.replica.parameters:
        tensor = trainer.replica.tensors[parameter.name].data
        for part, _, rows in trainer.mesh.parts_of(parameter, tensor):
            if part.name == name:
                bits = rows.view(torch.int64).view(-1)
                bits[0] ^= 1 << 20
                return
    raise AssertionError(f"this rank has no {name}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_token_files(folder)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_copies_stay_equal(ranks, data, name):
    changes = LAYOUTS[name]
    assert set(ranks.run(train, ranks_of(changes), folder=data, changes=changes)) == {""}


@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_is_found_and_its_rank_named(ranks, data, name):
    tensor, rank, named = FLIPS[name]
    changes = LAYOUTS[name]
    results = ranks.run(train, ranks_of(changes), folder=data, changes=changes, hit=(tensor, rank, named))
    assert len(set(results)) == 1, results
    assert results[0].startswith(f"step 3: the copies of {tensor} differ"), results[0]
    assert named in results[0]


def state_differs(folder: Path, changes: dict[str, Any]) -> str:
    """Flip a bit of a moment of the optimizer on rank 1, which no weight shows before the next step."""
    trainer, _ = tiny_trainer(folder, changes)
    trainer.train_step()
    if trainer.mesh.rank == 1:
        shard = next(each for each in trainer.optimizer.state.shards() if each.key == "exp_avg_sq")
        shard.values.view(torch.int64)[0] ^= 1
    difference = compare_copies(trainer)
    assert difference is not None
    return str(cause(difference, trainer, folder / "step-000001"))


def test_the_state_of_the_optimizer_is_compared_too(ranks, data):
    changes = LAYOUTS["dp3"]
    [text] = set(ranks.run(state_differs, 3, folder=data, changes=changes))
    assert "the copies of exp_avg_sq of model.embed_tokens.weight differ" in text
    assert "rank 1 (pp 0, dp 1, tp 0), where it is not that of 2 other ranks" in text
    assert f"{data / 'step-000001'} was written before and is kept" in text


def test_what_has_one_copy_is_not_compared(ranks, data):
    changes, hit = {"parallel.pipeline": 2}, (WEIGHT, 1, "")
    assert ranks.run(train, 2, folder=data, changes=changes, hit=hit) == ["", ""]
