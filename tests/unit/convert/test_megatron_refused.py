"""Megatron-LM checkpoints that cannot be expressed, are damaged or not whole: refused by name, nothing is written."""

import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.convert.megatron.load import describe
from megalite.errors import CheckpointError
from tests.support.foreign import import_folder
from tests.support.megatron_writer import Written, arguments_of, write_megatron
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.unit.convert.test_megatron import numbered, weights_of

LLAMA = tiny_shape(layers=2)
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"


TWO_BY_TWO = Written(2, 2)


def written(tmp_path: Path, how: Written = TWO_BY_TWO, **changes: Any) -> Path:
    return write_megatron(tmp_path / "megatron", LLAMA, numbered(LLAMA), how, **changes)


def refusal(tmp_path: Path, folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    return str(refused.value)


NOT_BUILT = {
    "squared_relu": True,
    "quick_geglu": True,
    "apply_layernorm_1p": True,
    "apply_residual_connection_post_layernorm": True,
    "rotary_interleaved": True,
    "rotary_percent": 0.5,
    "num_experts": 8,
    "multi_latent_attention": True,
    "mtp_num_layers": 1,
    "position_embedding_type": "alibi",
    "normalization": "L2Norm",
    "softmax_type": "learnable",
    "window_size": (4, 4),
    "window_attn_skip_freq": 2,
    "hybrid_override_pattern": "M*M*",
}


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_is_not_built_is_named(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, Written(), **{name: NOT_BUILT[name]})
    said = refusal(tmp_path, folder)
    assert "megalite does not support" in said and f"{name} = {NOT_BUILT[name]!r}" in said
    assert any("not supported: " in line and name in line for line in describe(folder))


def test_all_of_what_is_not_built_is_named_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, written(tmp_path, Written(), squared_relu=True, num_experts=[4]))
    assert "num_experts = [4], squared_relu = True" in said and "Megatron-Bridge" not in said


def test_a_mixture_has_a_way_out(tmp_path: Path) -> None:
    said = refusal(tmp_path, written(tmp_path, Written(), num_experts=4))
    assert "num_experts = 4; write a mixture as Hugging Face files with Megatron-Bridge" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 3}, "num_layers = 3, but its files hold 2 layers"),
        ({"num_layers": 10**12}, "num_layers = 1000000000000, which is no size"),
        ({"hidden_size": "48"}, "hidden_size = '48', which is no size"),
        ({"hidden_size": None}, "hidden_size = None, which is no size"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"num_query_groups": 3}, "3 query groups for 8 heads"),
        ({"norm_epsilon": -1.0}, "norm_epsilon = -1.0, which is no number above 0"),
        ({"hidden_size": torch.ones(2)}, "hidden_size = None"),
        ({"swiglu": "yes"}, "swiglu = 'yes', which is neither True nor False"),
        (
            {"tensor_model_parallel_size": 4},
            "tensor_model_parallel_size = 4, but there are files of 2 rank(s)",
        ),
        ({"pipeline_model_parallel_size": 1}, "pipeline_model_parallel_size = 1, but there are files of 2"),
        ({"hidden_size": 64}, "word_embeddings.weight is (52, 48) on each rank, but its args give (52, 64)"),
        ({"ffn_hidden_size": 80}, "linear_fc2.weight is (48, 38) on each rank, but its args give (48, 40)"),
        ({"swiglu": False}, "mlp.linear_fc1.weight is (76, 48) on each rank, but its args give (38, 48)"),
        (
            {"add_qkv_bias": True},
            "model_optim_rng.pt lacks decoder.layers.0.self_attention.linear_qkv.bias, which its args imply",
        ),
        (
            {"qk_layernorm": True},
            "lacks decoder.layers.0.self_attention.q_layernorm.weight, decoder.layers.0",
        ),
        ({"normalization": "LayerNorm"}, "lacks decoder.layers.0.self_attention.linear_qkv.layer_norm_bias"),
        (
            {"untie_embeddings_and_output_weights": False},
            "output_layer.weight of the last stage differs from the first",
        ),
        (
            {"position_embedding_type": "learned_absolute"},
            "lacks embedding.position_embeddings.weight, which its args imply",
        ),
        (
            {"num_query_groups": 1, "num_attention_heads": 12, "kv_channels": 8},
            "linear_qkv.weight is (48, 48)",
        ),
    ],
    ids=str,
)
def test_arguments_of_another_model_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    message = refusal(tmp_path, written(tmp_path, replace(Written(2, 2), padded=104), **changes))
    assert said in message


def changed_file(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """One rank's file, with what `change` does to its content."""
    [path] = folder.glob(f"*/{name}/model_optim_rng.pt")
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    return folder


def of_model(name: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["model"].update({name: change(content["model"][name])})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content["model"].pop(QKV), f"mp_rank_01/model_optim_rng.pt lacks {QKV}, which"),
        (
            lambda content: content["model"].update({"decoder.layers.0.mlp.router.weight": torch.ones(2)}),
            "mp_rank_00/model_optim_rng.pt lacks decoder.layers.0.mlp.router.weight",
        ),
        (
            of_model(FC1, lambda tensor: tensor[:-1]),
            f"{FC1} is (75, 48) of float64, but (76, 48) of float64 on rank 0",
        ),
        (lambda content: content.update(iteration=900), "has iteration 900, but"),
        (lambda content: content.update(checkpoint_version=2.0), "has checkpoint_version 2.0, but"),
        (
            lambda content: content.update(checkpoint_version=4.0),
            "has checkpoint_version 4.0; supported are 0, 1, 2, 3",
        ),
        (lambda content: content.pop("args"), "has no args"),
        (lambda content: content.update(args={"num_layers": 2}), "has no args"),
        (lambda content: content.update(checkpoint_version=torch.ones(2)), "has checkpoint_version tensor"),
        (lambda content: content["model"].update(itself=content["model"]), "is a dict, not a dense tensor"),
        (of_model(NORM, lambda tensor: tensor.to("meta")), "not a dense tensor"),
        (lambda content: content.pop("model"), "holds no model"),
        (lambda content: content.update(model=3), "holds no model"),
        (of_model(NORM, lambda tensor: "words"), f"{NORM} is a str, not a dense tensor"),
        (of_model(NORM, lambda tensor: tensor.to_sparse()), "not a dense tensor"),
        (of_model(NORM, lambda tensor: torch.ones(1).expand(10**9)), "bytes, but the file"),
    ],
)
def test_a_file_unlike_the_others_is_named(tmp_path: Path, change: Any, said: str) -> None:
    folder = changed_file(written(tmp_path, Written(2)), "mp_rank_01", change)
    assert said in refusal(tmp_path, folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda content: content["model"].update({"decoder.layers.0.mlp.router.weight": torch.ones(2)}),
            "has decoder.layers.0.mlp.router.weight, which the model lacks",
        ),
        (
            lambda content: content["model"].update({"output_layer.bias": torch.ones(2)}),
            "has output_layer.bias, which the model",
        ),
        (
            lambda content: content["model"].update({QKV.replace("weight", "bias"): torch.ones(96)}),
            "has decoder.layers.0.self_attention.linear_qkv.bias, which the model of its args lacks",
        ),
        (
            lambda content: content["model"].update(
                {"decoder.layers.0.input_layernorm.weight": torch.ones(48)}
            ),
            "has decoder.layers.0.input_layernorm.weight, a second copy of decoder.layers.0.self_attention.",
        ),
        (lambda content: content["model"].pop(NORM), f"lacks {NORM}, which its args imply"),
        (lambda content: content["model"].pop(FC1), f"lacks {FC1}, which its args imply"),
        (
            lambda content: content["model"].pop("embedding.word_embeddings.weight"),
            "has no word_embeddings of 2 dims",
        ),
        (
            of_model("embedding.word_embeddings.weight", lambda tensor: tensor[0, 0]),
            "has no word_embeddings of 2 dims",
        ),
        (of_model(QKV, lambda tensor: tensor.to(torch.int8)), f"{QKV} is torch.int8"),
        (
            of_model(QKV, lambda tensor: tensor.t()),
            f"{QKV} is (48, 96) on each rank, but its args give (96, 48)",
        ),
        (
            lambda content: content["model"].update({FC1.replace("s.1", "s.7"): content["model"].pop(FC1)}),
            "holds layers [0, 1, 7]",
        ),
    ],
)
def test_a_tensor_too_much_too_few_or_unlike_is_named(tmp_path: Path, change: Any, said: str) -> None:
    folder = changed_file(written(tmp_path, Written()), "mp_rank_00", change)
    assert said in refusal(tmp_path, folder)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            Written(names="old", version=2.0),
            "language_model.transformer.layers.1.attention.query_key_value.bias",
        ),
        (Written(names="legacy"), "language_model.encoder.layers.1.self_attention.query_key_value.bias"),
        (
            Written(pipeline=2),
            "mp_rank_00_000/model_optim_rng.pt lacks decoder.layers.0.self_attention.linear_qkv.bias, which",
        ),
    ],
    ids=["old", "legacy", "of the first stage"],
)
def test_what_is_missing_has_the_name_that_the_file_would_give_it(
    tmp_path: Path, how: Written, said: str
) -> None:
    folder = write_megatron(tmp_path / "megatron", LLAMA, numbered(LLAMA), how, add_qkv_bias=True)
    assert said in refusal(tmp_path, folder)


def test_old_versions_had_no_groups(tmp_path: Path) -> None:
    folder = changed_file(
        written(tmp_path, Written()), "mp_rank_00", lambda content: content.update(checkpoint_version=1.0)
    )
    assert "checkpoint_version 1, which cannot have grouped-query attention" in refusal(tmp_path, folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda step: shutil.rmtree(step / "mp_rank_01_000"), "mp_rank_01_000/model_optim_rng.pt is missing"),
        (
            lambda step: (step / "mp_rank_01_001/model_optim_rng.pt").unlink(),
            "mp_rank_01_001/model_optim_rng.pt is",
        ),
        (lambda step: shutil.rmtree(step), "names iter_0001000, which is not there"),
        (
            lambda step: (step.parent / "latest_checkpointed_iteration.txt").write_text("soon"),
            "names no iteration",
        ),
        (
            lambda step: (step.parent / "latest_checkpointed_iteration.txt").unlink(),
            "name one of its folders: iter_",
        ),
        (lambda step: [shutil.rmtree(each) for each in step.iterdir()], "has no mp_rank_00 folder"),
        (lambda step: (step / "mp_rank_00_000_001").mkdir(), "expert parallelism is not"),
        (
            lambda step: shutil.copytree(step / "mp_rank_00_000", step / "mp_rank_00"),
            "with and without a pipeline",
        ),
        (lambda step: (step / "metadata.json").write_text("{}"), "--ckpt-convert-format torch"),
        (
            lambda step: (step / "mp_rank_00_001/model_optim_rng.pt").write_bytes(b"PK\3\4"),
            "not a complete file",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, damage: Any, said: str) -> None:
    folder = written(tmp_path)
    damage(folder / "iter_0001000")
    assert said in refusal(tmp_path, folder)


def test_copies_that_drifted_apart_are_told(tmp_path: Path) -> None:
    """Ranks that add up in another order end with other roundings of what they all keep."""
    shape = replace(LLAMA, tie_word_embeddings=True)
    weights = {name: tensor / 1000 + 1 for name, tensor in numbered(shape).items()}
    folder = write_megatron(tmp_path / "megatron", shape, weights, Written(2, 2))
    changed_file(folder, "mp_rank_01_001", of_model(NORM, lambda tensor: tensor * 1.001))
    changed_file(folder, "mp_rank_01_001", of_model("output_layer.weight", lambda tensor: tensor * 1.001))
    done = import_folder(folder, tmp_path / "run")
    head, norm = done.notes
    assert NORM in norm and "on tensor rank 1 differs from the first copy, which was used, by up to" in norm
    assert "output_layer.weight of the last stage differs" in head
    assert torch.equal(weights_of(done.checkpoint)["model.norm.weight"], weights["model.norm.weight"])
    changed_file(folder, "mp_rank_01_001", of_model(NORM, lambda tensor: tensor * 1.1))
    with pytest.raises(
        CheckpointError, match=r"on tensor rank 1 differs from the first copy by up to .*, more than"
    ):
        import_folder(folder, tmp_path / "again")


def test_a_run_that_has_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    folder = written(tmp_path)
    import_folder(folder, tmp_path / "run")
    with pytest.raises(CheckpointError, match="step-000000 exists already; name another folder"):
        import_folder(folder, tmp_path / "run")


def test_older_arguments_say_less(tmp_path: Path) -> None:
    """Those of 2021 know neither of rotary angles nor of RMSNorm, and call a size otherwise."""
    shape, how = replace(FAMILY_SHAPES["gpt2"], num_hidden_layers=2), Written(2, version=2.0, names="old")
    newer = vars(arguments_of(shape, how))
    kept = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings")
    table = {name: newer[name] for name in kept} | {"layernorm_epsilon": 1e-5, "model_parallel_size": 2}
    folder = write_megatron(tmp_path / "megatron", shape, numbered(shape), how)
    for rank in ("mp_rank_00", "mp_rank_01"):
        changed_file(folder, rank, lambda content: content.update(args=Namespace(**table)))
    done = import_folder(folder, tmp_path / "run", vocab_size=101)
    assert done.shape == shape
    for name, tensor in weights_of(done.checkpoint).items():
        assert torch.equal(tensor, numbered(shape)[name])
