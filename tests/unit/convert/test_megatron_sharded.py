"""Megatron-LM's torch_dist checkpoints without megatron-core: the forms of the optimizer's state, what is refused."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.cli import convert
from megalite.convert.megatron.buffers import BufferedParameter, bucket_sizes, fill_buckets
from megalite.convert.megatron.training_state import optimizer_scalars
from megalite.errors import CheckpointError
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from tests.support.foreign import import_folder
from tests.support.megatron_sharded import Form, write_sharded
from tests.support.megatron_writer import Written, write_megatron
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape

LLAMA = tiny_shape(layers=2)
GPT2 = replace(FAMILY_SHAPES["gpt2"], num_hidden_layers=2)
QWEN3 = replace(FAMILY_SHAPES["qwen3"], num_hidden_layers=2)
STATES = ("weight", "exp_avg", "exp_avg_sq")


def states_of(shape: ModelShape) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = canonical_tensors(shape)
    return {
        key: {name: torch.randn(size, generator=generator) for name, size in sizes.items()} for key in STATES
    }


def stored(checkpoint: Path) -> dict[tuple[str, str], Tensor]:
    with CheckpointReader(checkpoint) as reader:
        return {
            (key, name): reader.read(key, name, full_slice(entry.shape))
            for key, tensors in reader.manifest.tensors.items()
            for name, entry in tensors.items()
        }


@pytest.mark.parametrize(
    ("shape", "form"),
    cases(
        [(shape, form) for shape in (LLAMA, QWEN3, GPT2) for form in ("model space", "grid", "buckets")],
        core=[(QWEN3, "grid"), (LLAMA, "buckets")],
    ),
    ids=lambda value: value if isinstance(value, str) else value.family,
)
def test_each_form_of_the_state_is_read_to_the_bit(tmp_path: Path, shape: ModelShape, form: Form) -> None:
    states = states_of(shape)
    write_sharded(tmp_path / "theirs", shape, states, form)
    done = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert (done.shape, done.step, done.dtype) == (shape, 1000, torch.float32)
    trained, padded = done.notes
    assert "optimizer.learning_rate = 0.001" in trained and "over the 104 rows of the padded" in padded
    found = stored(done.checkpoint)
    assert found.keys() == {(key, name) for key in STATES for name in canonical_tensors(shape)}
    assert [at for at, tensor in found.items() if not torch.equal(tensor, states[at[0]][at[1]])] == []
    with CheckpointReader(done.checkpoint) as reader:
        assert reader.manifest.optimizer == {"step": 7}
        assert reader.manifest.trainer_state["samples"] == 56


def test_without_an_optimizer_the_weights_keep_their_type(tmp_path: Path) -> None:
    states = states_of(GPT2)
    path = write_sharded(tmp_path / "theirs", GPT2, states, "none")
    done = import_folder(path, tmp_path / "run")
    assert (done.shape, done.dtype, done.notes) == (GPT2, torch.bfloat16, [])
    for (key, name), tensor in stored(done.checkpoint).items():
        assert key == WEIGHT and torch.equal(tensor, states[key][name].bfloat16())


def test_inspect_shows_layout_and_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sharded(tmp_path / "theirs", LLAMA, states_of(LLAMA), "buckets")
    convert.run(["inspect", str(tmp_path / "theirs")])
    shown = capsys.readouterr().out
    assert f"{path}: a Megatron-LM checkpoint of global tensors (torch_dist)" in shown
    assert "iteration 1000, saved by tensor 1 x pipeline 1" in shown
    assert "decoder.layers.mlp.linear_fc2.weight" in shown and "2 x 48 x 76  bfloat16" in shown


@pytest.mark.extended
def test_places_in_another_order_of_modules_are_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path / "theirs", LLAMA, states_of(LLAMA), "buckets", transformer_impl="local")
    with pytest.raises(CheckpointError, match=r"does not round to its bfloat16 weights|has nan at"):
        import_folder(tmp_path / "theirs", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pipeline_model_parallel_layout": "Et|tL"}, "pipeline_model_parallel_layout = 'Et|tL' is not"),
        ({"tensor_model_parallel_size": 2}, "optimizer buckets of tensor rank 0 exactly"),
        ({"transformer_impl": "inference_optimized"}, "modules of transformer_impl = 'inference_optimized'"),
    ],
)
def test_buckets_of_unknown_places_are_left_with_a_note(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_sharded(tmp_path / "theirs", LLAMA, states_of(LLAMA), "buckets", **changes)
    done = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert done.dtype is torch.bfloat16
    [note] = done.notes
    assert said in note and "--dist-ckpt-optim-fully-reshardable" in note


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def _change_common(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        common = torch.load(path / "common.pt", weights_only=False)
        change(common)
        torch.save(common, path / "common.pt")

    return apply


def _set_argument(name: str, value: object) -> Callable[[Path], object]:
    return _change_common(lambda common: setattr(common["args"], name, value))


def _cut_short(name: str) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "said"),
    cases(
        [
            (lambda path: torch.save(Hostile(), path / "common.pt"), "asks for posix.system"),
            (_cut_short("common.pt"), "common.pt is not a complete file"),
            (_cut_short(".metadata"), "not a complete pickle"),
            (_cut_short("__0_0.distcp"), "the file is cut short"),
            (lambda path: (path / "__0_0.distcp").unlink(), "lacks __0_0.distcp"),
            (lambda path: (path / ".metadata").unlink(), "lacks .metadata"),
            (lambda path: (path / "metadata.json").write_text("[]"), "metadata.json cannot be read"),
            (
                lambda path: (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"})),
                "names the backend 'zarr'; first convert",
            ),
            (_change_common(lambda common: common.pop("args")), "has no args"),
            (_set_argument("num_layers", 3), "but its args give 3 layers"),
            (_set_argument("num_layers", 1 << 60), "num_layers = 1152921504606846976, which is no size"),
            (_set_argument("ffn_hidden_size", 80), r"but its args give \(2, 48, 80\)"),
            (
                _set_argument("qk_layernorm", True),
                "lacks decoder.layers.0.self_attention.k_layernorm.weight",
            ),
            (
                _set_argument("untie_embeddings_and_output_weights", False),
                "has output_layer.weight, which the",
            ),
            (_set_argument("num_experts", 8), "does not support num_experts = 8"),
            (
                _change_common(lambda common: common["optimizer"]["optimizer"].pop("param_groups")),
                "has no param_groups",
            ),
            (
                _change_common(
                    lambda common: common["optimizer"]["optimizer"]["param_groups"][0].pop("step")
                ),
                "parameters have no numbers of updates",
            ),
        ],
        core=lambda case: "asks for" in case[1] or "cut short" in case[1] or "lacks __0" in case[1],
    ),
)
def test_what_is_damaged_or_hostile_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_sharded(tmp_path / "theirs", LLAMA, states_of(LLAMA), "model space")
    damage(path)
    with pytest.raises(CheckpointError, match=said):
        import_folder(tmp_path / "theirs", tmp_path / "run")
    assert not (tmp_path / "executed").exists() and not (tmp_path / "run").exists()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("exp_avg", "model.norm.weight", "exp_avg of model.norm.weight"),
        (
            "weight",
            "model.layers.1.mlp.down_proj.weight",
            "model.layers.1.mlp.down_proj.weight does not round",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, key: str, name: str, said: str) -> None:
    states = states_of(LLAMA)
    states[key][name].flatten()[3] = torch.nan
    write_sharded(tmp_path / "theirs", LLAMA, states, "model space")
    with pytest.raises(CheckpointError, match=said):
        import_folder(tmp_path / "theirs", tmp_path / "run")


def test_rank_files_with_another_optimizer_give_their_weights(tmp_path: Path) -> None:
    weights = states_of(LLAMA)["weight"]
    path = (
        write_megatron(tmp_path / "theirs", LLAMA, weights, Written(padded=104)) / "iter_0001000/mp_rank_00"
    )
    content = torch.load(path / "model_optim_rng.pt", weights_only=False)
    group = {"lr": 1e-3, "params": list(range(15)), "step": 3}
    content["optimizer"] = {
        "optimizer": {"state": {0: {"momentum": torch.zeros(3)}}, "param_groups": [group]}
    }
    torch.save(content, path / "model_optim_rng.pt")
    done = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert done.dtype is torch.float32 and "the optimizer's state was left" in done.notes[0]
    content["optimizer"] = {"optimizer": {"param_groups": [{"lr": 1e-3, "step": 3}]}}
    torch.save(content, path / "model_optim_rng.pt")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"distrib_optim.pt is missing.*fetch it"):
        import_folder(tmp_path / "theirs", tmp_path / "run")


def test_a_bucket_ends_with_enough_elements_or_before_a_shared_embedding() -> None:
    layers = [BufferedParameter(name, size) for name, size in (("a", 100), ("b", 48), ("c", 70))]
    assert bucket_sizes(layers, None) == [64 * 2 + 64 + 100] and bucket_sizes(layers, 100) == [176, 100]
    first = [BufferedParameter("embedding", 10, own_bucket=True), *layers]
    # The bucket before it ends with the alignment of its start.
    assert bucket_sizes(first, None) == [320, 10]
    places = fill_buckets(first, [320, 10])
    assert places is not None
    assert {name: (place.bucket, place.start) for name, place in places.items()} == {
        **{"c": (0, 0), "b": (0, 128), "a": (0, 192)},
        "embedding": (1, 0),
    }
    assert fill_buckets(first, [300, 10]) is None and fill_buckets(first, [320, 10, 5]) is None


def test_a_scale_that_falls_at_each_overflow_has_one_left() -> None:
    scaler = {"scale": 4.0, "growth_tracker": 0, "hysteresis_tracker": -1}
    scalars = optimizer_scalars([{"step": 3}], [], scaler, Path("theirs"))
    assert scalars.loss_scale["loss_scale_overflows_left"] == 1


@pytest.mark.parametrize("name", ["scale", "growth_tracker", "hysteresis_tracker"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.ones((), device="meta")], ids=str)
def test_a_scale_that_is_no_number_is_one_error(name: str, value: object) -> None:
    scaler = {"scale": 4.0, "growth_tracker": 0, "hysteresis_tracker": 1, name: value}
    with pytest.raises(CheckpointError, match="its grad_scaler has no scale, growth_tracker"):
        optimizer_scalars([{"step": 3}], [], scaler, Path("theirs"))
