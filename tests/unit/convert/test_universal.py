"""Universal checkpoints without DeepSpeed: round trips, the names that its engine asks for, and what is refused."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.folder import find_checkpoint
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.weights import WeightReader
from megalite.cli import convert
from megalite.convert.foreign.streamed import ImportedRun, write_streamed
from megalite.convert.universal.export import export_universal
from megalite.errors import CheckpointError
from megalite.families.registry import family_tensors, hf_config
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice
from tests.support.foreign import import_folder
from tests.support.tiny import FAMILY_SHAPES, tiny_shape, tiny_tokenizer

ADAMW = ("weight", "exp_avg", "exp_avg_sq")
STATE = {"step": 7, "samples": 56, "tokens": 672, "skipped_steps": 2}


class RandomReader(WeightReader):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def close(self) -> None:
        pass

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        return torch.randn(region.shape, generator=self.generator)


def saved(run: Path, shape: ModelShape, kinds: tuple[str, ...] = ADAMW) -> Path:
    """A checkpoint of random numbers."""
    config = {"optimizer": {"learning_rate": 0.01, "betas": [0.9, 0.95]}}
    imported = ImportedRun(shape, config, state_keys=kinds, trainer_state=STATE, optimizer={"step": 5.0})
    return write_streamed(run, imported, RandomReader())


def contents(checkpoint: Path, kinds: tuple[str, ...] = ADAMW) -> dict[tuple[str, str], Tensor]:
    with CheckpointReader(checkpoint) as reader:
        tensors = reader.manifest.tensors
        assert set(tensors) == set(kinds)
        return {
            (kind, name): reader.read(kind, name, full_slice(entry.shape))
            for kind in kinds
            for name, entry in tensors[kind].items()
        }


@pytest.mark.parametrize("shape", FAMILY_SHAPES.values(), ids=FAMILY_SHAPES)
def test_there_and_back_is_bit_exact(tmp_path: Path, shape: ModelShape) -> None:
    shape = replace(shape, num_hidden_layers=2, full_attention_layers=0)
    checkpoint = saved(tmp_path / "one", shape)
    export_universal(checkpoint, tmp_path / "left")
    convert.run(["import", str(tmp_path / "left"), str(tmp_path / "other")])
    back = find_checkpoint(tmp_path / "other")
    expected, found = contents(checkpoint), contents(back)
    assert found.keys() == expected.keys()
    assert [key for key, values in expected.items() if not torch.equal(values, found[key])] == []
    with CheckpointReader(back) as reader:
        assert reader.manifest.trainer_state == {**STATE, "tokens": 0}
        assert reader.manifest.optimizer == {"step": 5.0}


@pytest.mark.parametrize(
    "family", ["llama 3", "qwen2 tied", "phi3", "gemma2", "gpt2", "gpt2 untied", "gpt_neox"]
)
def test_it_holds_the_parameters_of_transformers_model_as_plain_tensors(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    export_universal(saved(tmp_path / "run", FAMILY_SHAPES[family]), tmp_path / "left")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "left"))
    tag = (tmp_path / "left" / "latest_universal").read_text()
    zero = tmp_path / "left" / tag / "zero"
    theirs = {name: values.shape for name, values in model.named_parameters()}
    assert {each.name for each in zero.iterdir() if each.is_dir()} == theirs.keys()
    for name, shape in theirs.items():
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            values = torch.load(zero / name / f"{kind}.pt", weights_only=True)["param"]
            assert values.shape == shape and values.dtype == torch.float32
            assert values.untyped_storage().nbytes() == values.nbytes
        assert torch.load(zero / name / "step.pt", weights_only=True) == 5
    third = torch.load(zero / "optimizer_state.pt", weights_only=True)["optimizer_state_dict"]
    assert isinstance(third["state"][0]["step"], int) and third["state"][0]["step"] == 5
    engine = torch.load(tmp_path / "left" / tag / "mp_rank_00_model_states.pt", weights_only=True)
    assert (engine["global_steps"], engine["skipped_steps"]) == (7, 2)
    assert engine["lr_scheduler"] == {"last_batch_iteration": 4}


def test_the_masters_of_a_16_bit_run_are_what_is_written(tmp_path: Path) -> None:
    kinds = (*ADAMW, "master")
    checkpoint = saved(tmp_path / "run", tiny_shape(layers=1), kinds)
    export_universal(checkpoint, tmp_path / "left")
    name = "model.norm.weight"
    values = torch.load(next((tmp_path / "left").glob(f"*/zero/{name}/fp32.pt")), weights_only=True)["param"]
    assert torch.equal(values, contents(checkpoint, kinds)["master", name])


def test_an_optimizer_with_more_state_than_adamw_is_not_taken_for_it(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "run", tiny_shape(layers=1), (*ADAMW, "exp_avg_diff"))
    with pytest.raises(CheckpointError, match="has exp_avg, exp_avg_diff, exp_avg_sq, but"):
        export_universal(checkpoint, tmp_path / "left")
    assert not (tmp_path / "left").exists()
    averaged = saved(tmp_path / "averaged", tiny_shape(layers=1), (*ADAMW, "ema"))
    export_universal(averaged, tmp_path / "averaged weights")
    assert (tmp_path / "averaged weights" / "latest_universal").exists()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("universal")
    export_universal(saved(folder / "run", tiny_shape(layers=1)), folder / "left")
    return folder / "left"


def _zero(folder: Path) -> Path:
    (found,) = folder.glob("*/zero")
    return found


def _flip_a_bit(path: Path) -> None:
    """Flip a bit of the tensor's last number."""
    values = torch.load(path)["param"].flatten()
    stored, content = values.numpy().tobytes(), bytearray(path.read_bytes())
    content[content.index(stored) + len(stored) - 1] ^= 1
    path.write_bytes(content)


def _resaved(
    change: Callable[[Tensor], object], kind: str = "exp_avg", name: str = "model.norm.weight"
) -> Callable[[Path], object]:
    def change_file(folder: Path) -> None:
        path = _zero(folder) / name / f"{kind}.pt"
        content = torch.load(path, weights_only=True)
        torch.save(change(content["param"] if isinstance(content, dict) else content), path)

    return change_file


class _Unknown:
    pass


def _without_moments(folder: Path) -> None:
    for path in _zero(folder).glob("*/exp_avg*.pt"):
        path.unlink()


BAD = {
    "no optimizer file": (
        lambda folder: (_zero(folder) / "optimizer_state.pt").unlink(),
        "optimizer_state.pt",
    ),
    "another optimizer": (
        _without_moments,
        "exp_avg.pt is missing: every parameter needs fp32, exp_avg, exp_avg_sq",
    ),
    "another shape": (
        _resaved(lambda values: {"param": values[1:].clone()}),
        "exp_avg of model.norm.weight has shape (47,), but its config.json gives (48,)",
    ),
    "an unknown parameter": (
        lambda folder: shutil.copytree(_zero(folder) / "model.norm.weight", _zero(folder) / "lora_A.weight"),
        "has lora_A.weight, which the model of its config",
    ),
    "a parameter too few": (
        lambda folder: shutil.rmtree(_zero(folder) / "model.norm.weight"),
        "lacks model.norm.weight; use the config.json of this checkpoint",
    ),
    "parameters updated less often": (_resaved(lambda step: step - 1, "step"), "model.norm.weight/step.pt 4"),
    "a class of theirs": (
        _resaved(lambda values: _Unknown()),
        "asks for tests.unit.convert.test_universal",
    ),
    "moments of LAMB": (
        lambda folder: torch.save(
            {"global_steps": 7, "skipped_steps": 2, "ds_config": {"optimizer": {"type": "Lamb"}}},
            _zero(folder).parent / "mp_rank_00_model_states.pt",
        ),
        "was trained with Lamb, but only the states of Adam and AdamW are read",
    ),
    "no tensor": (_resaved(lambda values: {"param": [1.0]}), "exp_avg.pt holds no tensor of a parameter"),
    "no steps": (_resaved(lambda step: "five", "step"), "step.pt has no number of updates"),
    "no end of steps": (
        _resaved(lambda step: torch.tensor(float("nan")), "step"),
        "has no number of updates",
    ),
    "another engine's file": (
        lambda folder: torch.save([1], _zero(folder).parent / "mp_rank_00_model_states.pt"),
        "mp_rank_00_model_states.pt holds no table",
    ),
    "a damaged file": (
        lambda folder: (_zero(folder) / "model.norm.weight" / "fp32.pt").write_bytes(
            b"PK\x03\x04" + bytes(50)
        ),
        "fp32.pt is not a complete file of torch.save",
    ),
    "a flipped bit": (
        lambda folder: _flip_a_bit(_zero(folder) / "model.norm.weight" / "fp32.pt"),
        "data/0 does not match its checksum",
    ),
    "no config.json": (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json, which gives the model's shape; name it with --hf-config",
    ),
    "latest_universal of what is not there": (
        lambda folder: (folder / "latest_universal").write_text("global_step9"),
        "names global_step9, which has no zero folder; write or fetch it again",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_whole_is_refused_and_nothing_written(tmp_path: Path, left: Path, case: str) -> None:
    change, said = BAD[case]
    folder = tmp_path / "left"
    shutil.copytree(left, folder)
    change(folder)
    with pytest.raises(CheckpointError) as refused:
        convert.run(["import", str(folder), str(tmp_path / "run")])
    assert said in str(refused.value)
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_names_of_a_wrapped_model_and_flat_tensors_are_read(tmp_path: Path, left: Path) -> None:
    """As ds_to_universal leaves them of ZeRO 3, which has the step in another file."""
    folder = tmp_path / "left"
    shutil.copytree(left, folder)
    zero = _zero(folder)
    for each in [each for each in zero.iterdir() if each.is_dir()]:
        (each / "step.pt").unlink()
        for path in each.glob("*.pt"):
            torch.save(torch.load(path, weights_only=True)["param"].flatten(), path)
        each.rename(zero / f"module.{each.name}")
    for which, source in (("flat", folder), ("whole", left)):
        convert.run(["import", str(source), str(tmp_path / which)])
    flat, whole = (contents(find_checkpoint(tmp_path / which)) for which in ("flat", "whole"))
    assert [key for key, values in whole.items() if not torch.equal(values, flat[key])] == []


def test_what_is_added_to_the_parameters_of_a_tied_model_is_passed_over(tmp_path: Path) -> None:
    shape = replace(FAMILY_SHAPES["gpt2"], num_hidden_layers=1)
    export_universal(saved(tmp_path / "run", shape), tmp_path / "left")
    zero = _zero(tmp_path / "left")
    for name in ("lm_head.weight", "transformer.h.0.attn.bias"):
        (zero / name).mkdir()
        shutil.copy(zero / "transformer.wte.weight" / "fp32.pt", zero / name)
    convert.run(["import", str(tmp_path / "left"), str(tmp_path / "other")])
    _resaved(lambda values: {"param": values + 1}, "fp32", "lm_head.weight")(tmp_path / "left")
    with pytest.raises(CheckpointError, match=r"has lm_head\.weight, which the model of its config"):
        convert.run(["import", str(tmp_path / "left"), str(tmp_path / "again")])


def test_the_model_may_be_named(tmp_path: Path, left: Path) -> None:
    folder, shape = tmp_path / "left", tiny_shape(layers=1)
    shutil.copytree(left, folder, ignore=shutil.ignore_patterns("config.json"))
    config = tmp_path / "model.json"
    config.write_text(json.dumps(hf_config(replace(shape, vocab_size=128), "float32", {})))
    with pytest.raises(CheckpointError, match="with the same vocab_size"):
        convert.run(["import", str(folder), str(tmp_path / "run"), "--hf-config", str(config)])
    config.write_text(json.dumps(hf_config(shape, "float32", {})))
    arguments = ["import", str(folder), str(tmp_path / "run"), "--hf-config", str(config)]
    convert.run(arguments)
    with pytest.raises(CheckpointError, match="exists already; name another folder"):
        convert.run(arguments)


def test_inspect_shows_what_is_there(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.run(["inspect", str(left)])
    said = " ".join(capsys.readouterr().out.split())
    count = len(family_tensors(tiny_shape(layers=1)))
    assert f"a DeepSpeed universal checkpoint, {count} parameters step 7, 5 updates, 56 samples" in said
    assert "model.layers.0.self_attn.k_proj.weight 24 x 48 float32 exp_avg, exp_avg_sq, fp32, step" in said


@pytest.mark.parametrize("newer", [9, 7, None])
def test_a_later_step_of_the_engine_is_named(tmp_path: Path, left: Path, newer: int | None) -> None:
    """newer: the engine's step; None: its files cannot be read, which is no matter for this import."""
    folder, tag = tmp_path / "left", "global_step9"
    shutil.copytree(left, folder)
    (folder / tag).mkdir()
    (folder / "latest").write_text(tag)
    states = folder / tag / "mp_rank_00_model_states.pt"
    torch.save({"global_steps": newer, "skipped_steps": 0}, states)
    notes = "\n".join(import_folder(folder, tmp_path / "run").notes)
    named = "latest_universal is global_step7_universal of step 7, but latest is global_step9 of step 9"
    assert (named in notes) == (newer == 9)
    assert (str(folder / tag) in notes) == (newer == 9)


def test_an_engine_without_a_count_of_samples_leaves_the_position_open(tmp_path: Path, left: Path) -> None:
    folder = tmp_path / "left"
    shutil.copytree(left, folder)
    states = _zero(folder).parent / "mp_rank_00_model_states.pt"
    for count, said in ((-1, "global_samples has no number"), ("many", "global_samples has no number")):
        torch.save({"global_steps": 7, "skipped_steps": 2, "global_samples": count}, states)
        with pytest.raises(CheckpointError, match=said):
            import_folder(folder, tmp_path / "run")
    torch.save({"global_steps": 7, "skipped_steps": 2}, states)
    with CheckpointReader(import_folder(folder, tmp_path / "run").checkpoint) as reader:
        assert reader.manifest.trainer_state["samples"] == 0


def test_without_adamws_state_nothing_is_written(tmp_path: Path) -> None:
    shape = tiny_shape(layers=1)
    for kinds, held in (
        (("weight",), "no optimizer state"),
        (("weight", "momentum_buffer"), "momentum_buffer"),
    ):
        checkpoint = saved(tmp_path / held.split()[0], shape, kinds)
        with pytest.raises(CheckpointError, match=f"has {held}, but a universal checkpoint needs AdamW's"):
            export_universal(checkpoint, tmp_path / "left")
    assert not (tmp_path / "left").exists()


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(content: object, file: IO[bytes]) -> None:
        """As torch does where its zip writer cannot go on."""
        file.write(b"PK")
        raise RuntimeError("unexpected pos 704 vs 598")

    checkpoint = saved(tmp_path / "run", tiny_shape(layers=1))
    monkeypatch.setattr("megalite.convert.universal.export.torch.save", stops)
    with pytest.raises(CheckpointError, match=r"cannot be written .*unexpected pos.*free space"):
        export_universal(checkpoint, tmp_path / "left")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_an_import_on_a_full_disk_leaves_nothing(
    tmp_path: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    hf_config = tmp_path / "model"
    hf_config.mkdir()
    shutil.copy(next(left.rglob("config.json")), hf_config)
    tiny_tokenizer(hf_config)
    monkeypatch.setattr("megalite.convert.foreign.streamed.write_tensor_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert.run(["import", str(left), str(tmp_path / "runs" / "run"), "--hf-config", str(hf_config)])
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_an_option_of_another_kind_of_folder_is_refused(tmp_path: Path, left: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is a DeepSpeed universal checkpoint, .* leave out --vocab-size"
    ):
        convert.run(["import", str(left), str(tmp_path / "run"), "--vocab-size", "5"])
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(CheckpointError, match=r"is a Megatron-LM checkpoint, .* leave out --hf-config"):
        convert.run(["import", str(tmp_path), str(tmp_path / "run"), "--hf-config", str(left)])


def test_an_earlier_one_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "run", tiny_shape(layers=1))
    for _ in range(2):
        export_universal(checkpoint, tmp_path / "left")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["left", "run"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="mine is neither empty nor a DeepSpeed universal checkpoint"):
        export_universal(checkpoint, mine)
    damaged = checkpoint / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    before = (tmp_path / "left" / "README.md").stat().st_ino
    with pytest.raises(CheckpointError, match="sha256"):
        export_universal(checkpoint, tmp_path / "left")
    assert (tmp_path / "left" / "README.md").stat().st_ino == before
    assert not list(tmp_path.glob(".left*"))


def test_a_head_is_read_by_its_name_in_either_version_of_transformers(tmp_path: Path) -> None:
    """GPT-NeoX's head is embed_out in a model of transformers 4, and lm_head in one of 5."""
    checkpoint = saved(tmp_path / "run", FAMILY_SHAPES["gpt_neox"])
    export_universal(checkpoint, tmp_path / "left")
    zero = tmp_path / "left" / (tmp_path / "left" / "latest_universal").read_text() / "zero"
    (zero / "lm_head.weight").rename(zero / "embed_out.weight")
    convert.run(["import", str(tmp_path / "left"), str(tmp_path / "other")])
    expected, found = contents(checkpoint), contents(find_checkpoint(tmp_path / "other"))
    assert all(torch.equal(values, found[key]) for key, values in expected.items())
