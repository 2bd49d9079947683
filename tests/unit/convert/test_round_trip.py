"""A Hugging Face folder through megalite and out again keeps every key that megalite does not use itself."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from megalite import Trainer, load_config
from megalite.cli import convert
from megalite.convert.huggingface.export import export
from megalite.convert.huggingface.origin import Origin, end_ids
from megalite.errors import CheckpointError
from megalite.families.registry import hf_config
from tests.support.jobs import training_here
from tests.support.tiny import FAMILY_SHAPES, tiny_corpus, tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

INVENTED = {"x_invented": {"depth": [1, None, "two"]}}
CONFIG = {
    **INVENTED,
    "eos_token_id": [0, 7, 9],
    "pad_token_id": 3,
    "bos_token_id": 5,
    "use_cache": False,
    "attention_dropout": 0.25,
    "task_specific_params": {"a": 1},
    "rope_scaling": None,
}
GENERATION = {**INVENTED, "eos_token_id": [0, 9], "pad_token_id": 3, "temperature": 0.6, "do_sample": True}
TOKENIZER = {**INVENTED, "padding_side": "left", "chat_template": "{{ messages }}", "model_max_length": 77}
SPECIAL = {**INVENTED, "pad_token": {"content": "a", "lstrip": True}}
# transformers would build another pipeline than tokenizer.json's from these.
REBUILDING = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "auto_map": {"AutoTokenizer": "code.Own"}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an invented key in each file."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "tokenizer").mkdir()
    tiny_tokenizer(folder / "tokenizer")
    shape = replace(tiny_shape(layers=2), vocab_size=384)
    checkpoint = save_stage(folder, shape, lively_stage(shape, scale=1.0))
    export(checkpoint, folder / "model", folder / "tokenizer")
    source = folder / "model"
    add(source / "config.json", CONFIG | {"auto_map": {"AutoModel": "code.Own"}})
    add(source / "generation_config.json", GENERATION)
    add(source / "tokenizer_config.json", TOKENIZER | REBUILDING)
    add(source / "special_tokens_map.json", SPECIAL)
    (source / "added_tokens.json").write_text('{"<|endoftext|>": 0}')
    (source / "chat_template.jinja").write_text("{{ messages }} {# invented #}")
    return source


@pytest.fixture
def in_this_process() -> Iterator[None]:
    with training_here():
        yield


def add(path: Path, keys: dict[str, Any]) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | keys))


def held(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def assert_kept(source: Path, left: Path, *, changed: frozenset[str] = frozenset()) -> None:
    """changed: keys of config.json that the run changed."""
    for name, ours in (
        ("config.json", {"auto_map", *changed}),
        ("generation_config.json", set()),
        ("tokenizer_config.json", set(REBUILDING)),
        ("special_tokens_map.json", set()),
        ("added_tokens.json", set()),
    ):
        before, after = held(source, name), held(left, name)
        lost = {
            key: value for key, value in before.items() if key not in ours and after.get(key, ...) != value
        }
        assert not lost, (name, lost)
        assert after["x_invented"] == INVENTED["x_invented"] if name != "added_tokens.json" else True
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (left / name).read_bytes() == (source / name).read_bytes()
    assert "auto_map" not in held(left, "config.json") and "auto_map" not in held(
        left, "tokenizer_config.json"
    )
    assert AutoConfig.from_pretrained(left).eos_token_id == [0, 7, 9]
    assert GenerationConfig.from_pretrained(left).eos_token_id == [0, 9]
    assert AutoTokenizer.from_pretrained(left).padding_side == "left"


def test_import_and_export_keep_every_key(source: Path, tmp_path: Path) -> None:
    assert convert.run(["import", str(source), str(tmp_path / "run")]) == 0
    assert convert.run(["export", str(tmp_path / "run"), str(tmp_path / "left")]) == 0
    assert_kept(source, tmp_path / "left")
    weights = [load_file(each / "model.safetensors") for each in (source, tmp_path / "left")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def settings(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    (folder / "train.txt").write_text("\n\n".join(tiny_corpus() * 4))
    return {
        "run": {"folder": folder / "run"},
        "model": model,
        "training": {
            "steps": 1,
            "sequence_length": 16,
            "micro_batch_size": 2,
            "global_batch_size": 2,
            "precision": "fp32",
            "threads": 1,
        },
        "data": {"source": folder / "train.txt", "workers": 1},
    }


@pytest.mark.parametrize("named", ["weights", "hf_config"])
def test_a_run_keeps_every_key(source: Path, tmp_path: Path, named: str, in_this_process: None) -> None:
    given = settings(tmp_path, {named: str(source)})
    if named == "hf_config":
        given["tokenizer"] = {"path": str(source)}
    result = Trainer(load_config(None, **given)).train()
    assert result.export is not None
    assert_kept(source, result.export)
    # Another run that goes on from its checkpoint has them too, with the dropout that it trains with.
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step-*")
    other = given | {
        "run": {"folder": tmp_path / "other"},
        "checkpoint": {"resume": str(checkpoint), "export_like": str(tmp_path / "nowhere")},
        "training": given["training"] | {"steps": 2},
        "model": given["model"] | {"attention_dropout": 0.0},
    }
    left = Trainer(load_config(None, **other)).train().export
    assert left is not None
    assert_kept(source, left, changed=frozenset({"attention_dropout"}))
    assert held(left, "config.json")["attention_dropout"] == 0.0


def test_what_the_shape_says_is_never_the_old_file_s(tmp_path: Path) -> None:
    """A file's rotary scaling, in the words of transformers 4, of a model that has none any more."""
    old = {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "model_type": "llama",
        "hidden_size": 9,
        **INVENTED,
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    ours = hf_config(tiny_shape(), "float32", {})
    written = Origin(tmp_path / "config.json").config_with(ours, {}, {})
    assert "rope_scaling" not in written and written["hidden_size"] == 48
    assert written["x_invented"] == INVENTED["x_invented"]
    assert Origin(None).config_with(ours, {"eos_token_id": 4}, {}) == ours | {"eos_token_id": 4}
    # Another family's words would be read as this one's.
    gpt2 = hf_config(FAMILY_SHAPES["gpt2"], "float32", {})
    assert "x_invented" not in Origin(tmp_path / "config.json").config_with(gpt2, {}, {})


@pytest.mark.parametrize(
    ("file", "tokenizer", "expected"),
    [
        ({"eos_token_id": [1, 2], "pad_token_id": 5}, {"eos_token_id": 2}, {"eos_token_id": [1, 2], "pad_token_id": 5}),
        (
            {"eos_token_id": [1, 2], "bos_token_id": 4, "pad_token_id": 5},
            {"eos_token_id": 3},
            {"eos_token_id": 3, "bos_token_id": None, "pad_token_id": None},
        ),
        (
            {"pad_token_id": 5},
            {"bos_token_id": 1, "eos_token_id": 3},
            {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 5},
        ),
        ({"eos_token_id": 1, "bos_token_id": 4}, {}, {"eos_token_id": 1, "bos_token_id": 4}),
    ],
    ids=["the same tokenizer", "another tokenizer", "no end before", "no tokenizer"],
)  # fmt: skip
def test_token_ids_are_those_of_the_exported_tokenizer(
    tmp_path: Path, file: dict[str, Any], tokenizer: dict[str, int], expected: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **file}))
    written = Origin(tmp_path / "config.json").config_with(
        hf_config(tiny_shape(), "float32", {}), tokenizer, {}
    )
    assert {key: written[key] for key in expected} == expected


def test_a_damaged_file_of_the_origin_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read .*; remove its folder"):
        Origin(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json holds no JSON object"):
        Origin(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("way", "value"), [("import", torch.nan), ("import", -torch.inf), ("run", torch.nan)], ids=str
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    source: Path, tmp_path: Path, way: str, value: float, in_this_process: None
) -> None:
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name][2, 3] = value
    (tmp_path / "model.safetensors").unlink()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} has {value} at \[2, 3\]"):
        if way == "import":
            convert.run(["import", str(tmp_path), str(tmp_path / "run")])
        else:
            Trainer(load_config(None, **settings(tmp_path, {"weights": str(tmp_path)}))).train()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("generation", "config", "turn_ends", "expected"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 1}, [7], [1, 2, 7]),
        ({"eos_token_id": 1}, {"eos_token_id": 1}, [7], [1, 7]),
        ({}, {"eos_token_id": [1, 2]}, [7], [1, 2, 7]),
        (None, {}, [7], [1, 7]),
        ({"eos_token_id": [1, 7]}, {"eos_token_id": 1}, [7], [1, 7]),
        ({"eos_token_id": 5}, {"eos_token_id": 5}, [7], [1, 7]),
        (None, {}, [1], 1),
        (None, {}, [], 1),
    ],
)
def test_ids_that_ended_answers_join_the_others(
    tmp_path: Path, generation: Any, config: Any, turn_ends: list[int], expected: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    written = Origin(tmp_path / "config.json").generation_with({"eos_token_id": 1}, turn_ends)
    assert written["eos_token_id"] == expected
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    ends = end_ids(tmp_path / "config.json")
    assert ends == frozenset(expected if isinstance(expected, list) else [expected])
