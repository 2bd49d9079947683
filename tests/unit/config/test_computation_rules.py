"""Messages about the settings that decide how a step is computed."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.runs import load


def test_attention_dropout_says_what_it_costs(tmp_path: Path) -> None:
    for setting, value, said in (
        ("model.kernels", "reference", '"reference"'),
        ("training.compile", True, "true"),
    ):
        [note] = load(tmp_path, {"model.attention_dropout": 0.1, setting: value}).notes
        assert note.startswith(
            f"model.attention_dropout = 0.1 with {setting} = {said} disables fused attention"
        )
    assert not load(tmp_path, {"model.attention_dropout": 0.1}).notes
    assert not load(tmp_path, {"model.residual_dropout": 0.1, "model.kernels": "reference"}).notes


def test_soft_caps_say_what_they_cost(tmp_path: Path) -> None:
    gemma = {"model.family": "gemma2", "model.tie_word_embeddings": True}
    [note] = load(tmp_path, {**gemma, "model.attn_logit_softcapping": 50.0}).notes
    assert note.startswith(
        "model.attn_logit_softcapping = 50.0 disables fused attention, which has no soft caps"
    )
    assert "stores two values per head and pair of tokens" in note
    [freed] = load(
        tmp_path, {**gemma, "model.attn_logit_softcapping": 50.0, "training.recompute": "selective"}
    ).notes
    assert "stores" not in freed
    assert not load(tmp_path, {**gemma, "model.final_logit_softcapping": 30.0}).notes


def test_compiled_layers_say_what_documents_cost(tmp_path: Path) -> None:
    for setting in ({"data.document_mask": True}, {"data.kind": "instruct"}):
        [note] = load(tmp_path, {"training.compile": True, **setting}).notes
        assert note.startswith(
            "training.compile with documents kept apart computes attention with a dense mask"
        )
    assert not load(tmp_path, {"data.document_mask": True}).notes


def test_sequence_parallelism_of_one_rank_is_said_to_do_nothing(tmp_path: Path) -> None:
    [note] = load(tmp_path, {"parallel.sequence": True}).notes
    assert note == "parallel.sequence = true has no effect with parallel.tensor = 1"
    assert not load(tmp_path, {"parallel.sequence": True, "parallel.tensor": 2}).notes


def test_a_loss_in_one_chunk_is_said_to_save_nothing(tmp_path: Path) -> None:
    changes = {"training.micro_batch_size": 2, "training.sequence_length": 64, "model.chunked_loss": 128}
    [note] = load(tmp_path, changes).notes
    assert note == "model.chunked_loss = 128 saves no memory: a micro batch has only 128 tokens on a rank"
    assert not load(tmp_path, changes | {"model.chunked_loss": 127}).notes
    [note] = load(tmp_path, changes | {"model.chunked_loss": 0, "training.sequence_chunk": 128}).notes
    assert note.startswith("training.sequence_chunk = 128 saves no memory")
    cut = changes | {"model.chunked_loss": 32, "parallel.context": 4, "parallel.data": 1}
    [note] = load(tmp_path, cut, world_size=4).notes
    assert note.endswith("only 32 tokens on a rank")


def test_a_chunk_of_the_sequence_is_one_of_the_loss_unless_that_has_its_own(tmp_path: Path) -> None:
    chunk = {"training.sequence_chunk": 4}
    derived = load(tmp_path, chunk)
    assert (derived.config.model.chunked_loss, derived.origin("model.chunked_loss")) == (4, "derived")
    assert load(tmp_path, chunk | {"model.chunked_loss": 2}).config.model.chunked_loss == 2
    assert load(tmp_path, {}).config.model.chunked_loss == 0


def test_a_rank_that_is_not_there_is_not_profiled(tmp_path: Path) -> None:
    """A note: a run that goes on with fewer ranks would otherwise end here."""
    changes = {"parallel.data": 2, "monitor.profile_ranks": [0, 2, 3]}
    assert not load(tmp_path, changes).notes
    [note] = load(tmp_path, {**changes, "monitor.profile_steps": [1]}).notes
    assert note == "monitor.profile_ranks: there is no rank 2 and no rank 3; the last one is 1"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel.pipeline": 2}, "in this layout each weight has one copy"),
        (
            {"parallel.data": 2, "deepspeed.zero_optimization.stage": 3},
            "ZeRO 3 keeps one copy of each weight",
        ),
        ({"parallel.data": 2}, None),
        ({"parallel.tensor": 2}, None),
    ],
)
def test_a_self_check_without_copies_is_told(
    tmp_path: Path, changes: dict[str, Any], why: str | None
) -> None:
    notes = load(tmp_path, {**changes, "monitor.self_check_every": 5}).notes
    told = [note for note in notes if note.startswith("monitor.self_check_every")]
    assert told == ([] if why is None else [f"monitor.self_check_every compares nothing: {why}"])
