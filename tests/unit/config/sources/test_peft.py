"""PEFT's adapter_config.json is an untrusted file: each thing that is wrong in it is one problem with a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config.sources.peft import ADAPTER_CONFIG, adapter_of_folder
from megalite.convert.peft.base import base_of_adapter
from megalite.errors import CheckpointError, ConfigError
from megalite.topology.adapter import Lora, Prefix
from tests.unit.config.runs import problems

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj"]}
MODEL = {"model.weights": str(Path(__file__).parents[1] / "small_llama")}


def written(folder: Path, text: str) -> Path:
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return adapter


def test_settings_that_a_file_leaves_out_are_peft_s(tmp_path: Path) -> None:
    folder = written(tmp_path, json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))
    assert adapter_of_folder(folder, "llama") == Lora(8, 8.0, ("q_proj",))


def test_names_of_the_family_become_canonical_ones(tmp_path: Path) -> None:
    folder = written(tmp_path, json.dumps(LORA | {"target_modules": ["dense", "fc1"]}))
    assert adapter_of_folder(folder, "phi") == Lora(4, 6.0, ("o_proj", "up_proj"))


def test_a_prefix_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, json.dumps({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 7}))
    assert adapter_of_folder(folder, "llama") == Prefix(7)


@pytest.mark.parametrize(
    ("content", "key", "said"),
    [
        ("{", "adapter.path", "cannot be read: Expecting property name"),
        ("[1]", "adapter.path", "holds no JSON object"),
        (json.dumps({"peft_type": "IA3"}), "adapter.path", 'peft_type "IA3"; LORA and PREFIX_TUNING'),
        (json.dumps(LORA | {"target_modules": ".*_proj"}), "adapter.path", "is not a list of names"),
        (json.dumps(LORA | {"modules_to_save": [3]}), "adapter.path", "modules_to_save [3], which is not"),
        (json.dumps(LORA | {"alpha_pattern": {"q_proj": 2}}), "adapter.path", "alpha_pattern"),
        (json.dumps(LORA | {"lora_alpha": "six"}), "adapter.alpha", '"six"'),
        (json.dumps(LORA | {"r": 0}), "adapter.rank", "0"),
        (json.dumps({"peft_type": "PREFIX_TUNING"}), "adapter.tokens", "should be"),
        (json.dumps(LORA | {"target_modules": ["c_attn"]}), "adapter.targets", '"c_attn" names no linear'),
    ],
)
def test_a_bad_file_is_one_problem(tmp_path: Path, content: str, key: str, said: str) -> None:
    folder = written(tmp_path, content)
    [problem] = problems(tmp_path, {**MODEL, "adapter.path": str(folder)})
    assert problem.key == key and said in str(problem)
    if key != "adapter.targets":  # which only a model can tell
        with pytest.raises(ConfigError):
            adapter_of_folder(folder, "llama")


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"base_model_name_or_path": null}', '{"base_model_name_or_path": "/nowhere/model"}'],
)
def test_a_base_that_is_not_there_is_asked_for(tmp_path: Path, content: str) -> None:
    folder = written(tmp_path, content)
    with pytest.raises(CheckpointError, match="--base FOLDER"):
        base_of_adapter(folder)
    assert base_of_adapter(folder, tmp_path) == tmp_path


@pytest.mark.parametrize("content", ["{", '{"weights": "x"}', "[]"])
def test_a_damaged_fingerprint_is_said(tmp_path: Path, content: str) -> None:
    folder = written(tmp_path, json.dumps(LORA))
    (folder / "megalite_base.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="is damaged"):
        base_of_adapter(folder)
