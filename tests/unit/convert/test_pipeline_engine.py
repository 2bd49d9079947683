"""Weights of DeepSpeed's pipeline engine without an engine: every way of cutting, and what is refused by name."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.cli import convert
from megalite.convert.foreign.formats import find_format
from megalite.errors import CheckpointError
from megalite.families.registry import hf_config
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from tests.support.foreign import import_folder
from tests.support.neox_pipeline import (
    HEADS,
    HIDDEN,
    LAYERS,
    PADDED,
    POSITIONS,
    Toy,
    cut,
    described,
    write_configs,
)
from tests.support.selection import cases

LLAMA = Toy(pipeline=1, parallel=False, rotary=1.0, rms=True, gated=True, biases=False, kv_heads=2)
TOYS = [
    Toy(model=4),
    Toy("neox 1", model=2, tied=True),
    Toy("neox 1", model=2, parallel=False, rotary=0, tied=True),
    replace(LLAMA, model=2),
    replace(LLAMA, program="neox 1", model=2),
    replace(LLAMA, program="megatron", model=2, tied=True),
    replace(LLAMA, program="megatron", kv_heads=HEADS, model=4),
    Toy("megatron", model=2, parallel=False, rotary=0, tied=True),
]


def shape_of(toy: Toy) -> ModelShape:
    """The model of a toy, by hand."""
    family = "gpt2" if toy.learned else "llama" if toy.gated else "gpt_neox"
    return ModelShape(
        vocab_size=PADDED,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=toy.kv_heads,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=toy.tied,
        family=family,
        position_embedding="learned" if toy.learned else "rope",
        norm="rms_norm" if toy.rms else "layer_norm",
        norm_placement="parallel" if toy.parallel else "pre",
        attention_bias=toy.biases,
        attention_output_bias=toy.biases,
        mlp_bias=toy.biases,
        gated_mlp=toy.gated,
        hidden_act="silu" if toy.gated else "gelu_pytorch_tanh" if toy.tanh else "gelu",
        partial_rotary_factor=1.0 if toy.learned else toy.rotary,
    )


def numbers(shape: ModelShape) -> dict[str, Tensor]:
    """Canonical weights of random numbers."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(size, generator=generator) for name, size in canonical_tensors(shape).items()}


def write(folder: Path, toy: Toy, tensors: dict[str, Tensor], **settings: Any) -> Path:
    """Write a step's folder of layers and model_states, and `latest`; return it. settings: change NeoX's."""
    step = folder / "global_step5"
    step.mkdir(parents=True)
    for rank in range(toy.model):
        layers: dict[str, dict[str, Tensor]] = {}
        for name, values in cut(toy, tensors, rank).items():
            layer, _, rest = name.partition(".")
            layers.setdefault(layer, {})[rest] = values.clone()
            if toy.parallel and name.endswith(("dense.bias", "2.bias", "4h_to_h.bias")):
                layers[layer][rest] = values / toy.model
        for layer, content in layers.items():
            torch.save(content, step / f"layer_{int(layer):02d}-model_{rank:02d}-model_states.pt")
    for index in range(toy.model * toy.pipeline):
        state = {"iteration": 5, "global_steps": 5, "args": toy.arguments, "module": None, "optimizer": None}
        torch.save(state, step / f"mp_rank_{index:02d}_model_states.pt")
    write_configs(toy, step)
    if settings:
        (step / "configs" / "more.json").write_text(json.dumps(settings))
    (folder / "latest").write_text("global_step5")
    return step


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    with CheckpointReader(checkpoint) as reader:
        entries = reader.manifest.tensors["weight"]
        return {name: reader.read("weight", name, full_slice(entry.shape)) for name, entry in entries.items()}


@pytest.mark.parametrize("toy", cases(TOYS, core=[TOYS[1], TOYS[6]]), ids=described)
def test_every_cut_is_put_together(tmp_path: Path, toy: Toy) -> None:
    tensors = numbers(shape_of(toy))
    write(tmp_path / "left", toy, tensors)
    imported = import_folder(tmp_path / "left", tmp_path / "run")
    assert imported.shape == shape_of(toy) and imported.step == 5
    weights = weights_of(imported.checkpoint)
    assert weights.keys() == tensors.keys()
    assert [name for name, values in tensors.items() if not torch.equal(values, weights[name])] == []


def test_the_vocabulary_loses_its_padding_when_asked(tmp_path: Path) -> None:
    toy = Toy(model=2)
    tensors = numbers(shape_of(toy))
    write(tmp_path / "left", toy, tensors)
    convert.run(["import", str(tmp_path / "left"), str(tmp_path / "run"), "--vocab-size", "99"])
    weights = weights_of(next((tmp_path / "run" / "checkpoints").glob("step-*")))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weights[name], tensors[name][:99])


def test_a_folder_without_model_ranks_and_settings_is_read_with_a_config(tmp_path: Path) -> None:
    toy = Toy(pipeline=1)
    step = write(tmp_path / "left", toy, numbers(shape_of(toy)))
    for path in step.glob("layer_*"):
        path.rename(step / path.name.replace("-model_00", "", 1))
    import_folder(tmp_path / "left", tmp_path / "run")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape_of(toy), "float32", {})))
    shutil.rmtree(step / "configs")
    with pytest.raises(CheckpointError, match=r"configs is missing.*--hf-config"):
        import_folder(tmp_path / "left", tmp_path / "other")
    again = import_folder(tmp_path / "left", tmp_path / "other", hf_config=tmp_path / "config.json")
    assert again.shape == shape_of(toy)


def test_a_config_with_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    toy = Toy(pipeline=1)
    write(tmp_path / "left", toy, numbers(shape_of(toy)))
    larger = replace(shape_of(toy), vocab_size=PADDED + 1)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(larger, "float32", {})))
    with pytest.raises(CheckpointError, match=rf"has {PADDED} rows, but .* gives vocab_size {PADDED + 1};"):
        import_folder(tmp_path / "left", tmp_path / "run", hf_config=tmp_path / "config.json")


def test_layers_alone_are_weights_alone(tmp_path: Path) -> None:
    toy = Toy(pipeline=1)
    tensors = numbers(shape_of(toy))
    step = write(tmp_path / "left", toy, tensors)
    (step / STATE).unlink()
    imported = import_folder(tmp_path / "left", tmp_path / "run")
    weights = weights_of(imported.checkpoint)
    assert [name for name, values in tensors.items() if not torch.equal(values, weights[name])] == []
    assert any("weights alone" in note for note in imported.notes)


def test_the_last_ranks_state_is_missed_beside_its_optimizer(tmp_path: Path) -> None:
    step = write(tmp_path / "left", Toy(pipeline=2), numbers(shape_of(Toy())))
    for index in range(2):
        (step / f"zero_pp_rank_0_mp_rank_{index:02d}_optim_states.pt").touch()
    (step / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01_model_states.pt is missing"):
        import_folder(tmp_path / "left", tmp_path / "run")


def test_inspecting_names_layout_step_and_every_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = write(tmp_path, Toy(model=2), numbers(shape_of(Toy())), **{"use-mup": True})
    convert.run(["inspect", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith(f"{step}: ") and "of model 2 x pipeline 2, with the names of GPT-NeoX" in lines[0]
    )
    assert "step 5" in lines[1] and "not supported: use_mup = True" in lines[4]
    assert any(line.split() == ["word_embeddings.weight", "52", "x", "32", "float32"] for line in lines)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "GPT-2 with the exact GELU": ({"pos_emb": "learned", "gpt_j_residual": False}, "hidden_act = 'gelu'"),
    "sparse attention": ({"attention_config": [[["local"], 4]]}, "attention_config"),
    "alibi": ({"pos_emb": "alibi"}, "pos_emb = 'alibi'"),
    "scalenorm": ({"norm": "scalenorm"}, "norm = 'scalenorm'"),
    "norms of query and key": ({"use_qk_layernorm": True}, "use_qk_layernorm = True"),
    "maximal update": ({"use_mup": True}, "use_mup = True"),
    "one norm for both": ({"gpt_j_tied": True}, "norm_placement = 'parallel_shared'"),
    "another size": ({"hidden_size": 48}, r"word_embeddings.weight is \(104, 32\).*\(104, 48\)"),
    "more layers": ({"num_layers": 5}, "lacks decoder layer 4"),
    "no biases": (
        {"use_bias_in_attn_linear": False},
        "has attention.dense.bias, attention.query_key_value.bias",
    ),
    "no size": ({"num_attention_heads": "4"}, "num_attention_heads = '4', which is no size"),
    "2^60 heads": ({"num_attention_heads": 1 << 60}, "which is no size"),
}


@pytest.mark.parametrize(
    ("changes", "message"), cases(REFUSED.values(), core=lambda case: "hidden_size" in case[0]), ids=REFUSED
)
def test_another_model_than_can_be_built_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    toy = Toy(pipeline=1)
    step = write(tmp_path / "left", toy, numbers(shape_of(toy)))
    rewrite(step / "mp_rank_00_model_states.pt", lambda state: state.update(args=None))
    settings = {name.replace("-", "_"): value for name, value in toy.settings.items()}
    (step / "configs" / "model.yml").write_text(json.dumps(settings | changes))
    with pytest.raises(CheckpointError, match=message):
        import_folder(tmp_path / "left", tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(torch.load(path)["mlp.linear1.weight"].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


LAYER, STATE = "layer_03-model_00-model_states.pt", "mp_rank_00_model_states.pt"
# Each line has ten times the values of the one before.
GROWING = "a0: &a0 [global]\n" + "".join(
    f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(12)
)
DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a layer is missing": (LAYER, Path.unlink, rf"{LAYER} is missing"),
    "a rank's state is missing": (STATE, Path.unlink, rf"{STATE} is missing"),
    "a layer is cut short": (LAYER, cut_short, rf"{LAYER} is not a complete file"),
    "a layer is no torch file": (
        LAYER,
        lambda path: path.write_bytes(b"GGUF" * 99),
        rf"{LAYER} is not a complete",
    ),
    "a bit is flipped": (LAYER, flip, rf"{LAYER} is damaged"),
    "a layer names a function": (
        LAYER,
        lambda path: torch.save({"x": Evil()}, path),
        rf"{LAYER} asks for print, .*no code was",
    ),
    "a state names a function": (
        STATE,
        lambda path: torch.save({"args": Evil()}, path),
        rf"{STATE} asks for print, .*no code was",
    ),
    "a tensor is missing": (
        LAYER,
        lambda path: rewrite(path, lambda layer: layer.pop("attention.dense.bias")),
        "do not both have attention.dense.bias",
    ),
    "a tensor has another shape": (
        LAYER,
        lambda path: rewrite(path, lambda layer: layer.update({"attention.dense.bias": torch.zeros(31)})),
        r"attention.dense.bias is \(32,\).*\(31,\)",
    ),
    "a tensor claims 2^60 elements": (
        LAYER,
        lambda path: rewrite(
            path, lambda layer: layer.update({"attention.dense.bias": torch.zeros(1).expand(1 << 60)})
        ),
        "attention.dense.bias has .* bytes, but the file",
    ),
    "a tensor is a word": (
        LAYER,
        lambda path: rewrite(path, lambda layer: layer.update({"attention.dense.bias": "x"})),
        "attention.dense.bias is a str, not a tensor",
    ),
    "a copy differs": (
        LAYER,
        lambda path: rewrite(path, lambda layer: layer["input_layernorm.bias"].mul_(2)),
        "input_layernorm.bias in layer 3, rank 1 differs from the copy of rank 0",
    ),
    "a weight is no number": (
        LAYER,
        lambda path: rewrite(path, lambda layer: layer["attention.dense.weight"].fill_(float("nan"))),
        "attention.dense.weight has nan",
    ),
    "a step is no count": (
        STATE,
        lambda path: rewrite(path, lambda state: state.update(iteration=1 << 60)),
        "iteration is .*, which is no count",
    ),
    "settings twice": (
        "configs/local.yml",
        lambda path: path.write_text("num_layers: 4"),
        "has num_layers, which another file",
    ),
    "settings that grow without an end": (
        "configs/local.yml",
        lambda path: path.write_text(GROWING),
        "local.yml cannot be read",
    ),
    "settings that make an object": (
        "configs/local.yml",
        lambda path: path.write_text("x: !!python/object/apply:os.system ['true']"),
        "local.yml cannot be read",
    ),
}


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    cases(DAMAGE.values(), core=lambda case: "no code" in case[2] or "missing" in case[2]),
    ids=DAMAGE,
)
def test_damage_is_named_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, harm: Callable[[Path], Any], message: str
) -> None:
    toy = Toy(model=2)
    step = write(tmp_path / "left", toy, numbers(shape_of(toy)))
    harm(step / name)
    with pytest.raises(CheckpointError, match=message):
        import_folder(tmp_path / "left", tmp_path / "run")
    assert "executed" not in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def with_optimizer(folder: Path, config: dict[str, Any], **group: Any) -> Path:
    """Write a folder with ZeRO 0's optimizer, made as a DeepSpeed JSON says; group: hyperparameters beside lr."""
    toy = Toy(pipeline=1)
    step = write(folder, toy, numbers(shape_of(toy)))
    layers = [torch.load(path) for path in sorted(step.glob("layer_*"))]
    weights = [values for layer in layers for values in layer.values()]
    state = {
        index: {"step": 5, "exp_avg": torch.ones_like(values), "exp_avg_sq": torch.ones_like(values)}
        for index, values in enumerate(weights)
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.01, "params": list(state), **group}]}
    rewrite(step / STATE, lambda content: content.update(optimizer=optimizer, ds_config=config))
    return step


def test_the_settings_of_the_optimizer_are_kept(tmp_path: Path) -> None:
    config = {"optimizer": {"type": "CPU_Adam", "params": {"lr": 0.5}}, "gradient_clipping": 2.0}
    with_optimizer(tmp_path / "left", config, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2)
    imported = import_folder(tmp_path / "left", tmp_path / "run")
    with CheckpointReader(imported.checkpoint) as reader:
        assert reader.manifest.config["optimizer"] == {
            **{"name": "adamw", "learning_rate": 0.5, "betas": [0.9, 0.95], "eps": 1e-6},
            **{"weight_decay": 0.2, "gradient_clipping": 2.0},
        }


@pytest.mark.parametrize(
    ("section", "group", "message"),
    [
        ({"type": "Lamb"}, {}, "was trained with Lamb"),
        ({"type": "OneBitAdam"}, {}, "was trained with OneBitAdam"),
        (
            {"type": "Adam", "params": {"adam_w_mode": False}},
            {"weight_decay": 0.1},
            "was trained with Adam, whose",
        ),
        ({"type": "Adam"}, {"amsgrad": True}, "was trained with amsgrad"),
        ({"type": "Adam"}, {"bias_correction": False}, "was trained without bias_correction"),
    ],
)
def test_moments_of_another_optimizer_do_not_come_along(
    tmp_path: Path, section: dict[str, Any], group: dict[str, Any], message: str
) -> None:
    with_optimizer(tmp_path / "left", {"optimizer": section}, **group)
    imported = import_folder(tmp_path / "left", tmp_path / "run")
    with CheckpointReader(imported.checkpoint) as reader:
        assert set(reader.manifest.tensors) == {"weight"}
    assert any("weights alone" in note and message in note for note in imported.notes)


def test_a_tensor_that_no_rank_has_is_named(tmp_path: Path) -> None:
    step = write(tmp_path / "left", Toy(model=2), numbers(shape_of(Toy())))
    for path in step.glob("layer_07-*"):
        rewrite(path, lambda layer: layer.pop("norm.bias"))
    with pytest.raises(CheckpointError, match=r"layer_07-model_00-model_states.pt lacks norm.bias"):
        import_folder(tmp_path / "left", tmp_path / "run")


def test_a_pointer_to_the_folder_above_is_not_followed(tmp_path: Path) -> None:
    step = write(tmp_path / "left", Toy(), numbers(shape_of(Toy())))
    (step / "inner").mkdir()
    (step / "inner" / "latest").write_text("..")
    assert find_format(step / "inner") is None


@pytest.mark.parametrize("text", ["../left", "/etc", "..", "", "global_step6"])
def test_a_pointer_that_leaves_the_folder_is_not_followed(tmp_path: Path, text: str) -> None:
    write(tmp_path / "left", Toy(), numbers(shape_of(Toy())))
    (tmp_path / "left" / "latest").write_text(text)
    with pytest.raises(CheckpointError, match="name one of its folders: global_step5"):
        find_format(tmp_path / "left")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ({"ds_sequence_parallel_size": 2}, "ds_sequence_parallel_size = 2"),
        ({"num_experts": [8]}, r"num_experts = \[8\]"),
        ({"embed_layernorm": True}, "embed_layernorm = True"),
    ],
)
def test_other_models_of_megatron_deepspeed_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    toy = Toy("megatron", 1, parallel=False, rotary=0, tied=True)
    step = write(tmp_path / "left", toy, numbers(shape_of(toy)))
    arguments = Namespace(**vars(toy.arguments) | changes)
    rewrite(step / STATE, lambda state: state.update(args=arguments))
    with pytest.raises(CheckpointError, match=message):
        import_folder(tmp_path / "left", tmp_path / "run")


def test_keys_that_gpt_neox_does_not_have_are_said(tmp_path: Path) -> None:
    step = write(tmp_path / "left", LLAMA, numbers(shape_of(LLAMA)), normm="layernorm", mlp_type="llama")
    notes = import_folder(tmp_path / "left", tmp_path / "run").notes
    assert f"{step / 'configs'} has keys that megalite does not know, and ignores: normm" in notes
