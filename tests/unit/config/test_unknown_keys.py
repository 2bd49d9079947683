"""No reader of settings drops a part of its file without a word: an unknown key is planted at each level of each."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megalite.config.deepspeed.keys import EFFECTS, KEYS, Idle, PassedOn, Read, Refused
from megalite.config.load import load_run
from megalite.config.sections.describe import section_models
from megalite.config.sections.toml import format_table
from megalite.config.sources import huggingface
from megalite.config.sources.huggingface import shape_of_folder
from megalite.config.sources.peft import ADAPTER_CONFIG, adapter_of_folder
from megalite.errors import ConfigError
from megalite.families.registry import hf_config
from tests.support.tiny import FAMILY_SHAPES
from tests.unit.config.runs import RUN, changed

PLANTED = "planted_key"
VALUES: tuple[Any, ...] = (3, "text", {"inner": 1}, [1])


def said_of(folder: Path, tables: Mapping[str, Any], ds_json: Any = None, *flags: str) -> str:
    """Return all that loading a run says: problems, or notes where there are none."""
    if ds_json is not None:
        (folder / "ds.json").write_text(json.dumps(ds_json))
        tables = changed({"deepspeed.config": str(folder / "ds.json")}, tables)
    path = folder / "run.toml"
    path.write_text("\n".join(line for name, table in tables.items() for line in format_table(name, table)))
    try:
        return "\n".join(load_run(path, flags).notes)
    except ConfigError as error:
        return str(error)


SECTIONS = [*section_models(), "optimizer.inner", "training.inner", "data.inner.deeper"]
TABLES = {
    "optimizer.groups": {"pattern": "*norm*"},
    "data.blend": {"source": "stdlib", "weight": 1.0},
    "data.curriculum": {"step": 1, "weights": [1.0]},
}


@pytest.mark.parametrize("value", VALUES[:3], ids=repr)
@pytest.mark.parametrize("section", SECTIONS)
def test_run_toml(section: str, value: Any, tmp_path: Path) -> None:
    key = f"{section}.{PLANTED}"
    named = ".".join(key.split(".")[:2]) if section.count(".") else key
    assert named in said_of(tmp_path, changed({key: value}))
    if isinstance(value, int) and not section.startswith("deepspeed"):
        assert named in said_of(tmp_path, RUN, None, f"--{key}", str(value))


@pytest.mark.parametrize("key", TABLES)
def test_a_table_in_a_list_of_run_toml(key: str, tmp_path: Path) -> None:
    tables = changed({key: [TABLES[key] | {PLANTED: 1}]})
    assert f"{key}[1].{PLANTED}" in said_of(tmp_path, tables)


def test_outside_of_all_sections_of_run_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"{PLANTED} = 1\n[{PLANTED}_section]\nx = 1\n")
    with pytest.raises(ConfigError) as refused:
        load_run(path)
    assert f"{PLANTED}: unknown key" in str(refused.value)
    assert f"{PLANTED}_section: unknown section" in str(refused.value)


OPEN_BLOCKS = [
    *(path for path in KEYS if path),
    "optimizer",
    "scheduler",
    "optimizer.params",
    "scheduler.params",
]
# Below these everything is without effect, refused, or what the first word says.
BLOCKS_OF_NO_KEYS = sorted(
    {
        path
        for block, keys in KEYS.items()
        for key in keys
        if (path := f"{block}.{key}" if block else key) not in KEYS
        and isinstance(EFFECTS.get(path), Idle | Refused)
    }
)


@pytest.mark.parametrize("inline", [False, True], ids=["file", "RUN.toml"])
@pytest.mark.parametrize("block", ["", *OPEN_BLOCKS, *BLOCKS_OF_NO_KEYS])
def test_deepspeeds_json(block: str, inline: bool, tmp_path: Path) -> None:
    table: dict[str, Any] = {PLANTED: 7}
    if block in ("optimizer", "optimizer.params"):
        table |= {"type": "AdamW"} if block == "optimizer" else {}
    if block in ("scheduler", "scheduler.params"):
        table |= {"type": "WarmupLR"} if block == "scheduler" else {}
    content = table
    for name in reversed(block.split(".") if block else []):
        content = {name: content}
    if block.endswith(".params"):
        content[block.split(".")[0]]["type"] = {"optimizer": "AdamW", "scheduler": "WarmupLR"}[
            block.split(".")[0]
        ]
    said = said_of(tmp_path, {**RUN, "deepspeed": content}) if inline else said_of(tmp_path, RUN, content)
    assert PLANTED in said or (block in BLOCKS_OF_NO_KEYS and block in said), said


@pytest.mark.parametrize(
    "path", [path for path, effect in EFFECTS.items() if isinstance(effect, Read | PassedOn)]
)
def test_a_table_in_the_place_of_a_value_of_deepspeeds_json(path: str, tmp_path: Path) -> None:
    content: Any = {PLANTED: 7}
    for name in reversed(path.split(".")):
        content = {name: content}
    said = said_of(tmp_path, RUN, content)
    assert PLANTED in said or path in said or path.split(".")[-1] in said, said


def places(shape: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of each table of a family's config.json."""
    config = hf_config(FAMILY_SHAPES[shape], "float32", {})

    def below(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from below(value, (*path, key))

    yield from below(config, ())


PLACES = [(shape, path) for shape in FAMILY_SHAPES for path in places(shape)]


@pytest.mark.parametrize(
    ("shape", "path"), PLACES, ids=lambda value: value if isinstance(value, str) else ".".join(value)
)
def test_config_json(
    shape: str, path: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = hf_config(FAMILY_SHAPES[shape], "float32", {})
    table = config
    for name in path:
        table = table[name]
    table[PLANTED] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    tables = {
        **RUN,
        "tokenizer": {"vocab_size": "auto"},
        "model": {"hf_config": str(tmp_path)},
        "training": {**RUN["training"], "sequence_length": 8},
    }
    assert ".".join((*path, PLANTED)) in said_of(tmp_path, tables)
    huggingface._warn_once.cache_clear()
    shape_of_folder(str(tmp_path))
    shape_of_folder(str(tmp_path))
    assert len([line for line in caplog.messages if ".".join((*path, PLANTED)) in line]) == 1


BASE = Path(__file__).parent / "small_llama"
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
PREFIX = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}


@pytest.mark.parametrize("value", [*VALUES, True], ids=repr)
@pytest.mark.parametrize("kind", [LORA, PREFIX], ids=["LORA", "PREFIX_TUNING"])
def test_adapter_config_json(
    kind: dict[str, Any], value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(kind | {PLANTED: value}))
    tables = changed({"adapter.path": str(tmp_path), "model": {"weights": str(BASE)}})
    assert PLANTED in said_of(tmp_path, tables)
    adapter_of_folder(tmp_path, "llama")
    assert any(PLANTED in line for line in caplog.messages)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"init_lora_weights": name}
            for name in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga")
        ),
        *({name: {"x": 1}} for name in ("arrow_config", "kasa_config", "monteclora_config")),
        {"ensure_weight_tying": True},
    ],
    ids=str,
)
def test_what_changes_the_product_of_an_adapter_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(LORA | change))
    with pytest.raises(ConfigError) as refused:
        adapter_of_folder(tmp_path, "llama")
    assert next(iter(change)) in str(refused.value)


def test_each_key_that_peft_writes_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="gaussian")
    for config in (
        lora,
        peft.PrefixTuningConfig(num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=8),
    ):
        config.save_pretrained(tmp_path)
        adapter_of_folder(tmp_path, "llama")
    assert caplog.messages == []
