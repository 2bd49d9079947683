"""Checkpoints of DeepSpeed's engine without DeepSpeed: every partitioning, Trainer's folders, and what is refused."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.reader import CheckpointReader
from megalite.cli import convert
from megalite.convert.foreign.checkpoint import ImportOptions
from megalite.convert.foreign.formats import find_format
from megalite.convert.huggingface.export import read_family_tensor
from megalite.errors import CheckpointError
from megalite.families.registry import family_tensors, hf_config
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from tests.support.engine_folders import KEYS, EngineFolder, States, random_states
from tests.support.foreign import import_folder
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape

SHAPE = tiny_shape(tied=True, layers=1)
GPT2 = replace(FAMILY_SHAPES["gpt2"], num_hidden_layers=1)


def with_config(folder: Path, shape: ModelShape = SHAPE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    return folder


def differing(checkpoint: Path, states: States, shape: ModelShape) -> list[str]:
    shapes = canonical_tensors(shape)
    with CheckpointReader(checkpoint) as reader:
        return [
            f"{key} of {tensor.name}"
            for tensor in family_tensors(shape)
            for key, ours in zip(KEYS, ("weight", *KEYS[1:]), strict=True)
            if not torch.equal(read_family_tensor(reader, ours, tensor, shapes), states[tensor.name][key])
        ]


@pytest.mark.parametrize(
    ("stage", "ranks"), cases([(1, 1), (2, 3), (2, 8), (3, 1), (3, 2), (3, 5)], core=[(2, 3), (3, 2)])
)
@pytest.mark.parametrize("shape", cases([SHAPE, GPT2], core=[GPT2]), ids=lambda shape: shape.family)
def test_any_number_of_ranks_is_read_bit_for_bit(
    tmp_path: Path, shape: ModelShape, stage: int, ranks: int
) -> None:
    folder = with_config(tmp_path / "left", shape)
    states = random_states(shape)
    EngineFolder(states, stage, ranks, prefix="module." if ranks == 1 else "").write(folder)
    imported = import_folder(folder, tmp_path / "run")
    assert differing(imported.checkpoint, states, shape) == []
    with CheckpointReader(imported.checkpoint) as reader:
        assert reader.manifest.trainer_state == {"step": 7, "skipped_steps": 2, "samples": 56, "tokens": 0}
        assert reader.manifest.optimizer == {"step": 5.0}
        assert reader.manifest.config["optimizer"] | {"betas": None} == {
            **{"name": "adamw", "learning_rate": 0.01, "eps": 1e-8, "weight_decay": 0.1, "betas": None}
        }


def test_a_folder_of_trainer_is_read_with_its_moments_and_not_from_its_weights(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "checkpoint-7")
    (folder / "model.safetensors").touch()
    EngineFolder(random_states(SHAPE)).write(folder)
    assert import_folder(folder, tmp_path / "run").format == "a checkpoint of DeepSpeed's engine"
    assert import_folder(tmp_path, tmp_path / "other").step == 7
    with_config(tmp_path)  # the final model, of a later step
    assert find_format(tmp_path) is None


def test_inspect_shows_layout_step_names_and_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = EngineFolder(random_states(SHAPE), 3, 2).write(tmp_path)
    convert.run(["inspect", str(tmp_path)])
    shown = capsys.readouterr().out
    assert f"{place}: a checkpoint of DeepSpeed's engine, ZeRO 3 over 2 data-parallel ranks" in shown
    assert "step 7, 5 updates, 56 samples" in shown
    assert "  model.embed_tokens.weight" in shown and "101 x 48  fp32, exp_avg, exp_avg_sq" in shown


def test_weight_decay_that_differs_between_parameters_is_said(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "left")
    EngineFolder(random_states(SHAPE)).write(folder)
    notes = "\n".join(import_folder(folder, tmp_path / "run").notes)
    assert "weight decay 0.0: 3 parameters (model.embed_tokens.weight, " in notes
    assert "weight decay 0.1 applied to norms and biases too" in notes


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -2.0, 0.0, 65536.0])
def test_a_loss_scale_that_cannot_be_is_left_out(tmp_path: Path, scale: float) -> None:
    folder = with_config(tmp_path / "left")
    scaler = {"dynamic_loss_scale": True, "cur_scale": scale, "scale_window": 100}
    counters = {"cur_iter": 7, "last_overflow_iter": -1, "cur_hysteresis": 1}
    EngineFolder(random_states(SHAPE), optimizer={**scaler, **counters}).write(folder)
    with CheckpointReader(import_folder(folder, tmp_path / "run").checkpoint) as reader:
        assert reader.manifest.optimizer.get("loss_scale") == (scale if scale == 65536 else None)


def test_precision_and_clipping_are_those_of_the_engine(tmp_path: Path) -> None:
    """Also that it did not clip, where a run here clips by default."""
    folder = with_config(tmp_path / "left")
    precision = {"ds_config": {"bf16": {"enabled": True}}}
    EngineFolder(random_states(SHAPE), model=precision, optimizer={"clip_grad": 0.0}).write(folder)
    assert convert.run(["import", str(folder), str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "run.toml").read_text()
    assert 'precision = "bf16"' in text and "\ngradient_clipping = 0.0\n" in text


def test_settings_that_are_no_finite_numbers_are_left_out(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "left")
    EngineFolder(random_states(SHAPE)).write(folder)
    resaved(
        lambda folder: optimizer_file(folder, 0),
        lambda content: base_of(content)["param_groups"][0].update(lr=10**400, eps=float("nan")),
    )(folder)
    imported = import_folder(folder, tmp_path / "run")
    with CheckpointReader(imported.checkpoint) as reader:
        assert not {"learning_rate", "eps"} & reader.manifest.config["optimizer"].keys()


def optimizer_file(folder: Path, rank: int = 1) -> Path:
    return folder / "global_step7" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(folder: Path) -> Path:
    return folder / "global_step7" / "mp_rank_00_model_states.pt"


def resaved(
    file: Callable[[Path], Path], change: Callable[[dict[str, Any]], object]
) -> Callable[[Path], object]:
    """Return a change of a folder: a file with another content; `change` returns it, or changes what it gets."""

    def change_file(folder: Path) -> None:
        content = torch.load(file(folder), weights_only=True)
        torch.save(change(content) or content, file(folder))

    return change_file


def with_shape(name: str, *shape: int) -> Callable[[Path], object]:
    def change(content: dict[str, Any]) -> None:
        group = next(group for group in content["param_shapes"] if name in group)
        group[name] = torch.Size(shape)

    return resaved(model_file, change)


def without(key: str) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state.pop(key)

    return change


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return __import__("os").system, ("touch run-by-the-pickle",)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def base_of(content: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = content["optimizer_state_dict"]["base_optimizer_state"]
    return base


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated file": (
        lambda folder: truncated(optimizer_file(folder)),
        "is not a complete file of torch.save",
    ),
    "a flipped bit": (lambda folder: flip_a_bit(optimizer_file(folder)), "does not match its checksum"),
    "another magic": (
        lambda folder: optimizer_file(folder).write_bytes(b"\x80\x02" + bytes(99)),
        "is not a complete file of torch.save",
    ),
    "code in the optimizer's file": (
        lambda folder: torch.save(RunsCode(), optimizer_file(folder)),
        "asks for posix.system" if sys.platform != "win32" else "asks for nt.system",
    ),
    "code in the model's file": (
        lambda folder: torch.save({"module": RunsCode()}, model_file(folder)),
        "which is not among the classes allowed in such files; no code was run",
    ),
    "a rank too few": (
        lambda folder: optimizer_file(folder, 0).unlink(),
        "lacks the files of data-parallel rank 0, beside zero_pp_rank_1",
    ),
    "the last rank missing": (lambda folder: optimizer_file(folder).unlink(), "is one of 2 partitions, but"),
    "no optimizer files": (
        lambda folder: [path.unlink() for path in (folder / "global_step7").glob("*optim*")],
        "has no optimizer, and no *_optim_states.pt file is beside it",
    ),
    "a size of 2^60": (with_shape("model.norm.weight", 1 << 60), "make 11529215"),
    "sizes whose product is no number of elements": (
        with_shape("model.norm.weight", 1 << 40, 1 << 40),
        "make 12089258",
    ),
    "elements of no parameter": (with_shape("model.norm.weight", 4), "elements in parameter group 1, but"),
    "a negative size": (with_shape("model.norm.weight", -48), "has no readable param_shapes"),
    "another model's config.json": (
        lambda folder: with_config(folder, tiny_shape(tied=True, layers=2)),
        "lacks model.layers.1.input_layernorm.weight",
    ),
    "a smaller model's config.json": (
        lambda folder: with_config(folder, replace(SHAPE, vocab_size=100)),
        "fp32 of model.embed_tokens.weight has shape (101, 48), but its config.json gives (100, 48)",
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "name it with --hf-config"),
    "an optimizer without a second moment": (
        resaved(optimizer_file, without("exp_avg_sq")),
        "lacks exp_avg_sq of model.",
    ),
    "an optimizer with more state": (
        resaved(
            optimizer_file, lambda content: base_of(content)["state"][0].update(max_exp_avg_sq=torch.ones(9))
        ),
        "an optimizer with max_exp_avg_sq, but only the states of Adam and AdamW are read",
    ),
    "another optimizer": (
        resaved(model_file, lambda content: content.update(ds_config={"optimizer": {"type": "Lamb"}})),
        "was trained with Lamb, but only",
    ),
    "a weight decay inside of the gradient": (
        resaved(
            model_file,
            lambda content: content.update(
                ds_config={"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
            ),
        ),
        "was trained with Adam, whose weight decay is part of the gradient",
    ),
    "moments without bias correction": (
        resaved(
            lambda folder: optimizer_file(folder, 0),
            lambda content: base_of(content)["param_groups"][0].update(bias_correction=False),
        ),
        "was trained without bias_correction",
    ),
    "ranks of different steps": (
        resaved(optimizer_file, lambda content: base_of(content)["state"][0].update(step=6)),
        "had 5 and zero_pp_rank_1_mp_rank_00_optim_states.pt 6 updates",
    ),
    "a negative number of updates": (
        resaved(
            lambda folder: optimizer_file(folder, 0),
            lambda content: base_of(content)["state"][0].update(step=-1),
        ),
        "optim_states.pt has no number of updates",
    ),
    "states on another disk": (
        resaved(optimizer_file, lambda content: base_of(content)["state"].clear()),
        "ZeRO-Infinity leaves those offloaded to NVMe outside of it",
    ),
    "no state dict": (resaved(optimizer_file, lambda content: {"state": 1}), "lacks optimizer_state_dict"),
    "no counter": (
        resaved(model_file, lambda content: content.pop("global_steps") * 0),
        "no number in global_steps",
    ),
    "not finite": (
        resaved(
            optimizer_file,
            lambda content: base_of(content)["state"][0].update(exp_avg=torch.full((9000,), torch.nan)),
        ),
        "exp_avg of model.",
    ),
    "several model-parallel ranks": (
        lambda folder: shutil.copy(
            model_file(folder), model_file(folder).with_name("mp_rank_01_model_states.pt")
        ),
        "checkpoints of several model-parallel ranks (AutoTP) are not supported",
    ),
    "experts": (
        lambda folder: (folder / "global_step7" / "expp_rank_0_mp_rank_00_optim_states.pt").touch(),
        "has the files of experts",
    ),
    "a pointer that climbs out": (
        lambda folder: (folder / "latest").write_text("../left/global_step7"),
        "name one of its folders: global_step7",
    ),
    "a pointer to nothing": (
        lambda folder: (folder / "latest").write_text("global_step9"),
        "folders: global_step7",
    ),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_config(tmp_path_factory.mktemp("engine") / "left")
    EngineFolder(random_states(SHAPE)).write(folder)
    return folder


@pytest.mark.parametrize(
    "case",
    cases(
        BAD, core=["a truncated file", "code in the optimizer's file", "a rank too few", "another optimizer"]
    ),
)
def test_what_is_not_whole_is_refused_and_nothing_written(
    tmp_path: Path, left: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    change, said = BAD[case]
    folder = tmp_path / "left"
    shutil.copytree(left, folder)
    change(folder)
    with pytest.raises(CheckpointError) as refused:
        convert.run(["import", str(folder), str(tmp_path / "run")])
    assert said in str(refused.value)
    assert not list(tmp_path.glob("run/checkpoints/*")) and not (tmp_path / "run-by-the-pickle").exists()


def zero_0(folder: Path, groups: int) -> States:
    """Write a folder of ZeRO 0 in fp32, whose parameters are in turn in one of so many groups; return its states."""
    states, place = random_states(SHAPE), folder / "global_step7"
    place.mkdir()
    members = [list(states)[group::groups] for group in range(groups)]
    order = [name for group in members for name in group]
    state = {
        index: {"step": 5} | {key: states[name][key] for key in KEYS[1:]} for index, name in enumerate(order)
    }
    param_groups = [{"lr": 0.01, "params": [order.index(name) for name in group]} for group in members]
    module = {name: values["fp32"] for name, values in states.items()}
    module["lm_head.weight"] = module["model.embed_tokens.weight"]
    counters = {"global_steps": 7, "skipped_steps": 2, "global_samples": 56}
    content = {"module": module, "optimizer": {"state": state, "param_groups": param_groups}, **counters}
    torch.save(content, place / "mp_rank_00_model_states.pt")
    return states


def test_zero_0_is_read_where_its_order_is_the_only_one(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "one")
    states = zero_0(folder, 1)
    imported = import_folder(folder / "global_step7", tmp_path / "run")
    assert differing(imported.checkpoint, states, SHAPE) == []
    folder = with_config(tmp_path / "several")
    zero_0(folder, 2)
    with pytest.raises(
        CheckpointError, match=r"each be one of 2 with shape \(.*; save the checkpoint with ZeRO 1"
    ):
        import_folder(folder / "global_step7", tmp_path / "other")


def test_a_missing_moment_is_named_before_a_tensor_is_read(tmp_path: Path, left: Path) -> None:
    folder = tmp_path / "left"
    shutil.copytree(left, folder)
    resaved(optimizer_file, without("exp_avg"))(folder)
    known, place = find_format(folder) or pytest.fail("no format has the folder")
    with pytest.raises(CheckpointError, match=r"lacks exp_avg of model\."):
        known.loader().open_checkpoint(place, ImportOptions())
