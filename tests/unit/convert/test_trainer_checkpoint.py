"""Checkpoint folders that transformers' Trainer wrote go on here with the same next step; others are refused."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megalite.checkpoint.reader import CheckpointReader
from megalite.cli import convert
from megalite.convert.foreign.formats import find_format
from megalite.convert.trainer.parameters import parameters_in_order, possible_groups
from megalite.errors import CheckpointError
from megalite.families.registry import family_tensors, hf_config
from megalite.topology.shape import ModelShape
from tests.support.foreign import import_folder
from tests.support.next_step import LAYOUTS, NextStep, assert_next_step, states_of, token_rows
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.ranks import RankPool
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.trainer_program import OPTIMIZER, ROWS, STEPS, canonical_weights, run_trainer
from tests.unit.convert.test_foreign_pickle import Runs

pytestmark = pytest.mark.extended
SHAPES = {"llama": tiny_shape(layers=2), "gpt2": replace(FAMILY_SHAPES["gpt2"], num_hidden_layers=2)}


@dataclass(frozen=True)
class Program:
    """A run of the Trainer. folder: its checkpoint of step 3."""

    shape: ModelShape
    folder: Path
    next_step: NextStep


@pytest.fixture(scope="module", params=SHAPES)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder = tmp_path_factory.mktemp("trainer")
    shape = SHAPES[request.param]
    next_step = run_trainer(shape, folder)
    return Program(shape, folder / f"checkpoint-{STEPS}", next_step)


llama = pytest.mark.parametrize("program", ["llama"], indirect=True)


def moments_of(program: Program, key: str) -> dict[str, torch.Tensor]:
    """The moments by name, as the Trainer's own model orders its parameters."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(program.folder)
    content = torch.load(program.folder / "optimizer.pt")
    sizes = [len(group["params"]) for group in content["param_groups"]]
    decaying = [name for name, values in model.named_parameters() if values.dim() >= 2]
    others = [name for name, values in model.named_parameters() if values.dim() < 2]
    assert sizes == [len(decaying), len(others)]
    return {name: content["state"][number][key] for number, name in enumerate(decaying + others)}


def test_weights_moments_and_position_are_the_trainers(program: Program, tmp_path: Path) -> None:
    imported = import_folder(program.folder, tmp_path / "run")
    assert imported.format == "a Hugging Face Trainer checkpoint" and imported.step == STEPS
    states = states_of(imported.checkpoint)
    weights = canonical_weights(program.folder, program.shape)
    assert [name for name, values in weights.items() if not torch.equal(states["weight"][name], values)] == []
    for key in ("exp_avg", "exp_avg_sq"):
        moments = moments_of(program, key)
        for tensor in family_tensors(program.shape):
            stored = moments[tensor.name].t() if tensor.transposed else moments[tensor.name]
            ours = torch.cat([states[key][part] for part in tensor.parts])
            assert torch.equal(ours, stored), tensor.name
    with CheckpointReader(imported.checkpoint) as reader:
        samples = STEPS * ROWS
        assert reader.manifest.trainer_state == {"step": STEPS, "samples": samples, "tokens": 0}
        assert reader.manifest.optimizer == {"step": float(STEPS)}
        settings = reader.manifest.config["optimizer"]
    expected = {
        name.removeprefix("optimizer__"): value for name, value in OPTIMIZER.items() if "clip" not in name
    }
    assert settings == {"name": "adamw", **expected}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_step_is_the_trainers_own(
    program: Program, tmp_path: Path, ranks: RankPool, layout: str
) -> None:
    imported = import_folder(program.folder, tmp_path / "run")
    assert_next_step(ranks, imported.checkpoint, program.next_step, LAYOUTS[layout], **OPTIMIZER)


def test_an_export_has_the_logits_of_the_folder(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    convert.run(["import", str(program.folder), str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert "a Hugging Face Trainer checkpoint, step 3" in printed
    assert f"with the optimizer's state, after {STEPS * ROWS} samples" in printed
    convert.run(["export", str(tmp_path / "run"), str(tmp_path / "export")])
    input_ids = token_rows(program.shape, 9)
    models = [
        AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "export", program.folder)
    ]
    with torch.no_grad():
        ours, theirs = (model.eval()(input_ids=input_ids).logits for model in models)
    assert_close(ours, theirs, rtol=FLOAT32_RTOL)


def test_inspect_and_the_latest_step_of_a_runs_folder(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    convert.run(["inspect", str(program.folder.parent)])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"checkpoint-{STEPS + 1}: a Hugging Face Trainer checkpoint" in printed
    assert f"step {STEPS + 1}, {ROWS} sequences a step; 1 random state" in printed
    assert "parameters with exp_avg, exp_avg_sq, step" in printed and "optimizer.eps = 1e-06" in printed


def changed(program: Program, tmp_path: Path, change: Callable[[dict[str, Any], list[str]], object]) -> Path:
    """Copy the folder and change its optimizer's state_dict, of which the names of the parameters are known."""
    folder = tmp_path / program.folder.name
    shutil.copytree(program.folder, folder)
    content = torch.load(folder / "optimizer.pt")
    change(content, list(moments_of(program, "exp_avg")))
    torch.save(content, folder / "optimizer.pt")
    return folder


def _reordered(content: dict[str, Any], names: list[str], groups: list[list[str]]) -> None:
    """Number the parameters anew, in the order of these groups."""
    old = {name: content["state"][number] for number, name in enumerate(names)}
    order = [name for group in groups for name in group]
    content["state"] = {number: old[name] for number, name in enumerate(order)}
    template, content["param_groups"] = content["param_groups"], []
    for group, settings in zip(groups, template, strict=False):
        content["param_groups"].append({**settings, "params": [order.index(name) for name in group]})


def _as_model(program: Program) -> list[str]:
    from transformers import AutoModelForCausalLM

    return [name for name, _ in AutoModelForCausalLM.from_pretrained(program.folder).named_parameters()]


def _by_name(content: dict[str, Any], names: list[str]) -> None:
    """As FSDP's full state dict, which Accelerate saves."""
    content["state"] = {
        f"_fsdp_wrapped_module.{name}": content["state"][number] for number, name in enumerate(names)
    }
    for group in content["param_groups"]:
        group["params"] = [f"_fsdp_wrapped_module.{names[number]}" for number in group["params"]]


@pytest.mark.parametrize("which", ["norms decay, as in older versions", "one group", "by name"])
def test_other_orders_of_the_same_parameters_are_seen(program: Program, tmp_path: Path, which: str) -> None:
    model = _as_model(program)

    def change(content: dict[str, Any], names: list[str]) -> None:
        if which == "by name":
            _by_name(content, names)
        elif which == "one group":
            _reordered(content, names, [model])
        else:
            biases = [name for name in model if name.endswith("bias")]
            _reordered(content, names, [[name for name in model if name not in biases], biases])

    imported = import_folder(changed(program, tmp_path, change), tmp_path / "run")
    decaying = any("applied to norms and biases too" in note for note in imported.notes)
    assert decaying == (which != "by name")
    expected = states_of(import_folder(program.folder, tmp_path / "expected").checkpoint)
    states = states_of(imported.checkpoint)
    for key, tensors in expected.items():
        assert [name for name, values in tensors.items() if not torch.equal(states[key][name], values)] == []


def _first(content: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = content["state"][0]
    return state


REFUSED: dict[str, tuple[Callable[[dict[str, Any], list[str]], object], str]] = {
    "a frozen parameter": (
        lambda content, names: content["param_groups"][0]["params"].pop(),
        "groups of 15 and 5 parameters, which fits no order",
    ),
    "two parameters changed places": (
        lambda content, names: content["state"].update({0: content["state"][1], 1: content["state"][0]}),
        "groups of 16 and 5 parameters, which fits no order",
    ),
    "8 bits": (
        lambda content, names: content["state"].__setitem__(0, {"state1": torch.ones(3), "step": 3}),
        "the optimizer keeps state1, step of model.embed_tokens.weight, but AdamW",
    ),
    "amsgrad": (
        lambda content, names: content["param_groups"][0].__setitem__("amsgrad", True),
        "was trained with amsgrad",
    ),
    "Adam": (
        lambda content, names: content["param_groups"][0].__setitem__("decoupled_weight_decay", False),
        "trained with Adam, whose weight decay",
    ),
    "other steps": (
        lambda content, names: _first(content).__setitem__("step", torch.tensor(2.0)),
        "embed_tokens.weight had 2 and .* 3 updates",
    ),
    "a NaN": (
        lambda content, names: _first(content)["exp_avg"].__setitem__((3, 4), float("nan")),
        r"exp_avg of model\.embed_tokens\.weight has nan",
    ),
    "os.system": (
        lambda content, names: content.__setitem__("state", Runs(os.system, "touch trace")),
        r"optimizer\.pt asks for posix\.system, .*no code was run",
    ),
    "no groups": (lambda content, names: content.pop("param_groups"), "holds no state and param_groups"),
    "a name too many": (
        lambda content, names: (
            _by_name(content, names),
            content["param_groups"][0]["params"].append("lora_A"),
        ),
        "the optimizer has state of lora_A",
    ),
}


@llama
@pytest.mark.parametrize("case", REFUSED)
def test_another_optimizer_is_refused_and_nothing_written(
    program: Program, tmp_path: Path, case: str
) -> None:
    change, message = REFUSED[case]
    folder = changed(program, tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        convert.run(["import", str(folder), str(tmp_path / "run")])
    assert not list(tmp_path.glob("run/checkpoints/*"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a cut optimizer": (
        lambda folder: _cut(folder / "optimizer.pt"),
        r"optimizer\.pt is not a complete file",
    ),
    "another magic": (
        lambda folder: (folder / "optimizer.pt").write_bytes(b"version https://git-lfs"),
        r"optimizer\.pt is not a complete file",
    ),
    "cut weights": (lambda folder: _cut(folder / "model.safetensors"), r"model\.safetensors"),
    "no step": (lambda folder: (folder / "trainer_state.json").write_text("{}"), "has no global_step"),
    "a step of 2^60": (
        lambda folder: (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1 << 60})),
        "has no global_step",
    ),
    "an adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "holds an adapter, not a whole",
    ),
}


@llama
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_refused_and_nothing_written(program: Program, tmp_path: Path, case: str) -> None:
    change, message = DAMAGED[case]
    folder = tmp_path / program.folder.name
    shutil.copytree(program.folder, folder)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        convert.run(["import", str(folder), str(tmp_path / "run")])
    assert not list(tmp_path.glob("run/checkpoints/*"))


@llama
def test_what_is_beside_the_optimizer_is_optional(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / program.folder.name
    shutil.copytree(program.folder, folder)
    torch.save(Runs(os.system, f"touch {tmp_path / 'trace'}"), folder / "training_args.bin")
    torch.save({"scale": 1024.0, "_growth_tracker": 7, "growth_factor": 2.0}, folder / "scaler.pt")
    imported = import_folder(folder, tmp_path / "run")
    assert any("the global batch is not known" in note for note in imported.notes)
    with CheckpointReader(imported.checkpoint) as reader:
        assert reader.manifest.trainer_state["samples"] == 0
        assert reader.manifest.optimizer["loss_scale"] == 1024.0
    assert not (tmp_path / "trace").exists()
    (folder / "optimizer.pt").unlink()
    assert find_format(folder) is None, "without an optimizer it is a folder of Hugging Face weights"


def _scaler(scale: object, since: object = 7) -> Callable[[Path], object]:
    return lambda folder: torch.save({"scale": scale, "_growth_tracker": since}, folder / "scaler.pt")


SCALERS = {
    "nan": _scaler(float("nan")),
    "infinite": _scaler(torch.tensor(float("inf"))),
    "negative": _scaler(-1024.0),
    "zero": _scaler(0.0),
    "steps of nan": _scaler(1024.0, float("nan")),
    "steps before the first": _scaler(1024.0, -1),
    "2^60 steps": _scaler(1024.0, 1 << 60),
    "a list": lambda folder: torch.save([1024.0], folder / "scaler.pt"),
}


@llama
@pytest.mark.parametrize("case", SCALERS)
def test_a_loss_scale_that_cannot_be_is_left_out_and_said(
    program: Program, tmp_path: Path, case: str
) -> None:
    folder = shutil.copytree(program.folder, tmp_path / program.folder.name)
    SCALERS[case](folder)
    imported = import_folder(folder, tmp_path / "run")
    assert any("scaler.pt has no finite loss scale above zero" in note for note in imported.notes)
    with CheckpointReader(imported.checkpoint) as reader:
        assert reader.manifest.optimizer == {"step": float(STEPS)}


@llama
def test_a_folder_of_one_node_does_not_say_what_all_nodes_saw(program: Program, tmp_path: Path) -> None:
    """training_args.bin says one process, and two have left their random state."""
    folder = shutil.copytree(program.folder, tmp_path / program.folder.name)
    state = (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    shutil.copy(state, folder / "rng_state_1.pth")
    imported = import_folder(folder, tmp_path / "run")
    differing = "training_args.bin says 1 rank, but the folder has 2 random states"
    assert any(differing in note for note in imported.notes)
    with CheckpointReader(imported.checkpoint) as reader:
        assert reader.manifest.trainer_state == {"step": STEPS, "samples": 0, "tokens": 0}


@llama
def test_weights_without_their_optimizer_are_said_to_be_weights_alone(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(program.folder, tmp_path / program.folder.name)
    (folder / "optimizer.pt").unlink()
    line = f"{folder} is of step {STEPS}, but its optimizer's state is missing: weights only, as step 0"
    for number, (content, said) in enumerate(
        {None: True, '{"global_step": 0}': False, "{": False, "[]": False}.items()
    ):
        if content is not None:
            (folder / "trainer_state.json").write_text(content)
        convert.run(["import", str(folder), str(tmp_path / f"run-{number}")])
        assert (line in capsys.readouterr().out) == said


def test_bf16_weights_are_their_values_in_float32(tmp_path: Path) -> None:
    run_trainer(SHAPES["llama"], tmp_path / "theirs", torch.bfloat16)
    folder = tmp_path / "theirs" / f"checkpoint-{STEPS}"
    imported = import_folder(folder, tmp_path / "run")
    assert any("weights of bfloat16" in note for note in imported.notes)
    states = states_of(imported.checkpoint)
    weights = canonical_weights(folder, SHAPES["llama"])
    assert {values.dtype for values in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(states["weight"][name], values.float()) for name, values in weights.items())


def test_an_adapters_folder_is_still_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    (folder / "adapter_config.json").write_text("{}")
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 3)}, folder / "adapter_model.safetensors")
    convert.run(["inspect", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "a Hugging Face Trainer checkpoint of an adapter, step 7" in printed
    assert "base_model.model.lora_A.weight 2 x 3 F32" in printed


@pytest.mark.parametrize("family", FAMILY_SHAPES)
def test_the_groups_of_every_family_are_those_that_the_trainer_makes(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    shape = FAMILY_SHAPES[family]
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    groups = Trainer(model=model, args=arguments).create_optimizer().param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    theirs = [[names[parameter] for parameter in group["params"]] for group in groups]
    assert possible_groups(parameters_in_order(tmp_path))[0] == theirs
