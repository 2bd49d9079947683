"""FSDP2's and torchtitan's checkpoints, written by torch on two ranks, go on here with the same next step."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.cli import convert
from megalite.convert.torch_dcp.names import titan_name
from megalite.convert.torch_dcp.reader import DcpFolder
from megalite.errors import CheckpointError
from megalite.families.registry import hf_config
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from tests.support.foreign import import_folder
from tests.support.fsdp_programs import OPTIMIZER, STEPS, run_program
from tests.support.next_step import LAYOUTS, NextStep, assert_next_step, states_of, token_rows
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.ranks import RankPool
from tests.support.tiny import FAMILY_SHAPES, tiny_shape

pytestmark = pytest.mark.extended

SHAPES = {"torchtitan": tiny_shape(layers=2), "hugging face": tiny_shape(layers=2, tied=True)}
PREFIXES = {"torchtitan": ("", "optimizer."), "hugging face": ("app.model.", "app.optim.")}
# torchtitan lets the norms decay too; the import says how to go on so.
GROUPS: dict[str, dict[str, Any]] = {
    "torchtitan": {
        "optimizer__groups": [{"pattern": "*", "weight_decay": OPTIMIZER["optimizer__weight_decay"]}]
    },
    "hugging face": {},
}


@dataclass(frozen=True)
class Program:
    """A run of a program. folder: its checkpoint. config: a folder with the model's config.json."""

    name: str
    folder: Path
    truth: Mapping[str, Any]
    config: Path

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.name]

    def canonical(self, tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
        """Tensors under the program's names as those of the Hugging Face model."""
        if self.name != "torchtitan":
            inner = {
                name.removeprefix("model."): values
                for name, values in tensors.items()
                if not name.endswith("lm_head.weight")
            }
            return inner
        canonical = {}
        for name in canonical_tensors(shape):
            values = tensors[titan_name(name)]
            if ".q_proj." in name or ".k_proj." in name:
                heads = shape.num_attention_heads if ".q_proj." in name else shape.num_key_value_heads
                pairs = values.view(heads, shape.head_dim // 2, 2, -1)
                values = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).reshape(values.shape)
            canonical[name] = values
        return canonical


@pytest.fixture(scope="module", params=SHAPES)
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: RankPool
) -> Program:
    folder = tmp_path_factory.mktemp("fsdp")
    shape = SHAPES[request.param]
    ranks.run(run_program, 2, program=request.param, shape=shape, folder=str(folder))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    return Program(request.param, folder / f"step-{STEPS}", torch.load(folder / "truth.pt"), folder / "model")


def test_weights_and_moments_are_bit_equal(program: Program, tmp_path: Path) -> None:
    imported = import_folder(program.folder, tmp_path / "run", hf_config=program.config)
    assert imported.format == "a torch distributed checkpoint" and imported.step == STEPS
    states = states_of(imported.checkpoint)
    assert states.keys() == {"weight", "exp_avg", "exp_avg_sq"}
    moments = program.truth["moments"]
    expected = {
        "weight": program.canonical(program.truth["before"], program.shape),
        **{
            key: program.canonical({name: state[key] for name, state in moments.items()}, program.shape)
            for key in ("exp_avg", "exp_avg_sq")
        },
    }
    for key, tensors in expected.items():
        assert states[key].keys() == tensors.keys()
        assert [name for name, values in tensors.items() if not torch.equal(states[key][name], values)] == []
    with CheckpointReader(imported.checkpoint) as reader:
        tokens = STEPS * 96 if program.name == "torchtitan" else 0
        assert reader.manifest.trainer_state == {"step": STEPS, "samples": 0, "tokens": tokens}
        assert reader.manifest.optimizer == {"step": float(STEPS)}
        settings = reader.manifest.config["optimizer"]
    assert settings == {
        "name": "adamw",
        **{
            name.removeprefix("optimizer__"): value for name, value in OPTIMIZER.items() if "clip" not in name
        },
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_step_is_the_programs_own(
    program: Program, tmp_path: Path, ranks: RankPool, layout: str
) -> None:
    imported = import_folder(program.folder, tmp_path / "run", hf_config=program.config)
    truth = program.truth
    after = program.canonical(truth["after"], program.shape)
    expected = NextStep(token_rows(program.shape, STEPS), truth["loss"], truth["norm"], after)
    assert_next_step(
        ranks, imported.checkpoint, expected, LAYOUTS[layout], **OPTIMIZER, **GROUPS[program.name]
    )


def test_an_export_has_the_logits_of_the_program(program: Program, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert.run(["import", str(program.folder), str(tmp_path / "run"), "--hf-config", str(program.config)])
    convert.run(["export", str(tmp_path / "run"), str(tmp_path / "export")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=program.truth["input_ids"]).logits
    assert_close(logits, program.truth["logits"], rtol=FLOAT32_RTOL)


def test_the_command_names_format_and_step(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert.run(["import", str(program.folder), str(tmp_path / "run"), "--hf-config", str(program.config)])
    printed = capsys.readouterr().out
    assert "a torch distributed checkpoint, step 3" in printed
    assert "optimizer.learning_rate = 0.003" in printed
    assert ("torchtitan's names" in printed) == (program.name == "torchtitan")
    assert ("weight decay 0.1 applied to norms and biases too" in printed) == (program.name == "torchtitan")
    convert.run(["inspect", str(program.folder)])
    printed = " ".join(capsys.readouterr().out.split())
    model, optimizer = PREFIXES[program.name]
    name = "norm.weight" if program.name == "torchtitan" else "model.model.norm.weight"
    assert f"{model}{name} 48 float32 2 chunks" in printed
    assert "step 3;" in printed and f"{optimizer}state." in printed


def resaved(program: Program, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Load the entries of the program's checkpoint, change them, and save them again from one process."""
    names = DcpFolder(program.folder)
    content: dict[str, Any] = {
        name: names.read(name, full_slice(tensor.shape)) for name, tensor in names.tensors.items()
    }
    content |= {name: names.object(name) for name in names.metadata.objects}
    change(content)
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def _numbered(content: dict[str, Any]) -> None:
    """As optimizer.state_dict() has it."""
    for index, name in enumerate([name for name in content if ".state." in name]):
        content[f"optim.state.{index}.{name.rpartition('.')[2]}"] = content.pop(name)


def _q_proj(content: dict[str, Any], ending: str) -> str:
    return next(name for name in content if name.endswith((f"q_proj.weight{ending}", f"wq.weight{ending}")))


def _of_sgd(content: dict[str, Any]) -> None:
    for name in [name for name in content if name.endswith(".exp_avg_sq")]:
        del content[name]
        content[name.replace("exp_avg_sq", "momentum_buffer")] = content.pop(name.removesuffix("_sq"))


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a weight too few": (
        lambda content: content.pop(_q_proj(content, "")),
        "lacks .*(q_proj|wq).weight; use the config",
    ),
    "a moment too few": (
        lambda content: content.pop(_q_proj(content, ".exp_avg")),
        "lacks .*weight.exp_avg; every param",
    ),
    "a weight too many": (
        lambda content: content.__setitem__(_q_proj(content, "").replace("weight", "lora_A"), torch.ones(3)),
        r"has .*lora_A, which the model of its config\.json lacks",
    ),
    "amsgrad": (
        lambda content: content.__setitem__(
            _q_proj(content, ".exp_avg").replace("exp_avg", "max_exp_avg_sq"), torch.ones(48, 48)
        ),
        "has .*max_exp_avg_sq, which AdamW of this model does not have",
    ),
    "another shape": (
        lambda content: content.__setitem__(_q_proj(content, ""), torch.ones(48, 47)),
        r"weight has shape \(48, 47\), but its config.json gives \(48, 48\)",
    ),
    "integers": (
        lambda content: content.__setitem__(_q_proj(content, ""), torch.ones(48, 48, dtype=torch.int32)),
        "is of torch.int32; only",
    ),
    "a NaN": (
        lambda content: content[_q_proj(content, ".exp_avg")].__setitem__((2, 3), float("nan")),
        "exp_avg of model.layers.0.self_attn.q_proj.weight has nan",
    ),
    "other steps": (
        lambda content: content.__setitem__(_q_proj(content, ".step"), torch.tensor(2.0)),
        "had 3 and .*step 2 updates",
    ),
    "a second model": (
        lambda content: content.update(
            {
                f"ema.{name}": values
                for name, values in content.items()
                if name.endswith((".weight", "s.weight"))
            }
        ),
        "has several models, at .*ema",
    ),
    "numbered parameters": (
        _numbered,
        "numbers the parameters in its optimizer state .*get_optimizer_state_dict",
    ),
    "another optimizer": (_of_sgd, r"has momentum_buffer, step of .*, which is not AdamW's state"),
}


@pytest.mark.parametrize("program", ["hugging face"], indirect=True)
@pytest.mark.parametrize("case", REFUSED)
def test_another_content_is_refused_and_nothing_written(program: Program, tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    folder = resaved(program, tmp_path / "changed", change)
    with pytest.raises(CheckpointError, match=message):
        convert.run(["import", str(folder), str(tmp_path / "run"), "--hf-config", str(program.config)])
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_model_alone_is_imported_as_weights(program: Program, tmp_path: Path) -> None:
    def only_weights(content: dict[str, Any]) -> None:
        for name in list(content):
            if "state" in name or "param_groups" in name or "scheduler" in name:
                del content[name]

    folder = resaved(program, tmp_path / "step-7", only_weights)
    imported = import_folder(folder, tmp_path / "run", hf_config=program.config)
    states = states_of(imported.checkpoint)
    expected = program.canonical(program.truth["before"], program.shape)
    assert states.keys() == {"weight"} and imported.step == (7 if program.name == "torchtitan" else STEPS)
    assert [
        name for name, values in expected.items() if not torch.equal(states["weight"][name], values)
    ] == []


def test_without_a_config_the_option_is_named(program: Program, tmp_path: Path) -> None:
    who = "torchtitan" if program.name == "torchtitan" else r"torch\.distributed\.checkpoint"
    with pytest.raises(
        CheckpointError, match=f"was written by {who} and does not describe .* with --hf-config"
    ):
        convert.run(["import", str(program.folder), str(tmp_path / "run")])
    folder = shutil.copytree(program.folder, tmp_path / "with" / "step-3")
    shutil.copy(program.config / "config.json", folder.parent)
    convert.run(["import", str(folder.parent), str(tmp_path / "run")])


@pytest.mark.parametrize("program", ["hugging face"], indirect=True)
def test_accelerates_two_folders_are_one_checkpoint(program: Program, tmp_path: Path) -> None:
    """Accelerate's save_fsdp_model and save_fsdp_optimizer write {"model": ...} and {"optimizer": ...}."""
    model, optimizer = PREFIXES[program.name]

    def part(old: str, new: str, other: str) -> Callable[[dict[str, Any]], None]:
        def change(content: dict[str, Any]) -> None:
            kept = {name: value for name, value in content.items() if name.startswith(old)}
            content.clear()
            content.update(
                {
                    new + name.removeprefix(old): value
                    for name, value in kept.items()
                    if not other or not name.startswith(other)
                }
            )

        return change

    folder = tmp_path / "checkpoint-3"
    resaved(program, folder / "pytorch_model_fsdp_0", part(model, "model.", optimizer))
    resaved(program, folder / "optimizer_0", part(optimizer, "optimizer.", ""))
    shutil.copy(program.config / "config.json", folder)
    two = import_folder(folder, tmp_path / "two")
    one = import_folder(program.folder, tmp_path / "one", hf_config=program.config)
    assert two.step == STEPS
    for key, tensors in states_of(one.checkpoint).items():
        assert all(
            torch.equal(values, states_of(two.checkpoint)[key][name]) for name, values in tensors.items()
        )


@pytest.mark.parametrize("program", ["torchtitan"], indirect=True)
def test_torchtitans_names_of_another_family_are_refused(program: Program, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf_config(FAMILY_SHAPES["qwen3"], "float32", {})))
    with pytest.raises(
        CheckpointError, match=r"of its models only Llama is supported, but config\.json describes a qwen3"
    ):
        import_folder(program.folder, tmp_path / "run", hf_config=config)


def _of_2026(content: dict[str, Any]) -> None:
    for name in list(content):
        later = name.replace("output.weight", "lm_head.weight")
        for projection in ("wq", "wk", "wv"):
            later = later.replace(f".attention.{projection}.", f".attention.qkv_linear.{projection}.")
        content[later] = content.pop(name)


@pytest.mark.parametrize("program", ["torchtitan"], indirect=True)
def test_torchtitans_names_of_2026_are_read_too(program: Program, tmp_path: Path) -> None:
    folder = resaved(program, tmp_path / "later", _of_2026)
    later = states_of(import_folder(folder, tmp_path / "run", hf_config=program.config).checkpoint)
    states = states_of(
        import_folder(program.folder, tmp_path / "expected", hf_config=program.config).checkpoint
    )
    for key, tensors in states.items():
        assert [name for name, values in tensors.items() if not torch.equal(later[key][name], values)] == []


@pytest.mark.parametrize("program", ["torchtitan"], indirect=True)
def test_torchtitans_fused_projections_are_refused(program: Program, tmp_path: Path) -> None:
    def fuse(content: dict[str, Any]) -> None:
        content["layers.0.attention.qkv_linear.wqkv.weight"] = torch.ones(96, 48)

    folder = resaved(program, tmp_path / "fused", fuse)
    with pytest.raises(
        CheckpointError, match=r"qkv_linear\.wqkv\.weight, query, key and value in one tensor"
    ):
        import_folder(folder, tmp_path / "run", hf_config=program.config)
