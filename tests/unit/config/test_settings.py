"""Every setting of the schema, on the command line, in Python and in a written file: its words, its unset value."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from megalite.config.deepspeed.keys import KEYS
from megalite.config.flags import UNSET, apply_overrides, as_flags
from megalite.config.load import load_run
from megalite.config.output.write import write_resolved
from megalite.config.sections.describe import item_model, section_models, type_names
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.unchecked import SettingsDraft
from megalite.config.validate import validate
from tests.unit.config.runs import RUN, changed, load, problems, write_run

SETTINGS = {
    f"{section}.{key}": info
    for section, model in section_models().items()
    for key, info in model.model_fields.items()
}
_TYPES = ("INT", "NUMBER", "TEXT", "LIST", "true | false")
WORDS = [
    (key, word)
    for key, info in SETTINGS.items()
    for word in type_names(info.annotation)
    if word not in _TYPES
]
OPTIONAL = [key for key, info in SETTINGS.items() if info.default is None]
# Text that other readers take for something else.
_TEXTS = (
    "a text",
    "12",
    "true",
    "1e3",
    "none",
    "unset",
    'with "quotes"',
    "1f1b # no comment",
    "\x7f\\n\t\u2028",
)


def of_flags(*flags: str, values: dict[str, Any] | None = None) -> SettingsDraft:
    draft = SettingsDraft("run.toml", values or {})
    apply_overrides(draft, flags)
    return draft


def value_of(draft: SettingsDraft, key: str) -> Any:
    section, name = key.split(".")
    return draft.values[section][name]


def samples(info: FieldInfo) -> Iterator[Any]:
    """Yield values of every type that a setting takes."""
    bounds = [each for each in info.metadata]
    least = next((each.ge for each in bounds if hasattr(each, "ge")), None)
    names = type_names(info.annotation)
    if "INT" in names:
        yield 2 if least is None else max(int(least), 2)
    if "NUMBER" in names:
        yield from (0.5, 1e-05) if least is None or least <= 0 else (float(least) + 0.5,)
    if "TEXT" in names:
        yield from _TEXTS
    if "true | false" in names:
        yield from (True, False)
    yield from (name for name in names if name not in _TYPES)


@pytest.mark.parametrize(("key", "word"), WORDS, ids=lambda value: str(value))
def test_a_word_that_a_setting_lists_is_its_value(key: str, word: str) -> None:
    section, name = key.split(".")
    ways = {
        "a flag": of_flags(f"--{key}", word),
        "a flag with =": of_flags(f"--{key}={word}"),
        "a quoted flag": of_flags(f"--{key}", f'"{word}"'),
        "a flag over the file": of_flags(f"--{key}", word, values={section: {name: "another"}}),
        "Python": of_flags(*as_flags({section: {name: word}})),
    }
    assert {way: value_of(draft, key) for way, draft in ways.items()} == dict.fromkeys(ways, word)
    assert not any(draft.problems for draft in ways.values())


def test_some_settings_list_the_word_none() -> None:
    assert {key for key, word in WORDS if word == "none"} >= {
        *("data.packing", "training.recompute", "adapter.kind", "adapter.bias"),
    }


def test_the_word_that_unsets_is_no_value() -> None:
    assert UNSET not in {word for _, word in WORDS}


@pytest.mark.parametrize("key", SETTINGS)
def test_unset_removes_the_value_of_the_file_and_keeps_other_sources_away(key: str) -> None:
    section, name = key.split(".")
    written = {section: {name: "written", "other": 1}}
    for flags in (
        [f"--{key}", UNSET],
        [f"--{key}", "3", f"--{key}={UNSET}"],
        as_flags({section: {name: None}}),
    ):
        draft = of_flags(*flags, values={section: dict(written[section])})
        assert draft.values == {section: {"other": 1}}
        draft.set_behind(section, {name: "a preset's"}, "preset", named_by="model.preset")
        assert draft.values == {section: {"other": 1}}
    draft = of_flags(f"--{key}", UNSET, f"--{key}", '"x"')
    assert value_of(draft, key) == "x" and draft.unset == set()


@pytest.mark.parametrize("key", [key for key in SETTINGS if (key, "none") not in WORDS])
def test_none_is_refused_where_it_is_no_value(key: str) -> None:
    draft = of_flags(f"--{key}", "none")
    [problem] = draft.problems
    text = "TEXT" in type_names(SETTINGS[key].annotation)
    quoted = ", or '\"none\"' for the text" if text else ""
    assert (
        str(problem)
        == f'--{key}: "none" is no value of this setting; write unset to remove the value{quoted}'
    )
    assert draft.values == {}
    if text:
        assert value_of(of_flags(f"--{key}", '"none"'), key) == "none"


@pytest.mark.parametrize("key", SETTINGS)
def test_every_value_is_the_same_from_flags_from_python_and_from_a_written_file(
    key: str, tmp_path: Path
) -> None:
    section, name = key.split(".")
    for value in samples(SETTINGS[key]):
        from_python = of_flags(*as_flags({section: {name: value}}))
        assert value_of(from_python, key) == value and type(value_of(from_python, key)) is type(value)
        if not isinstance(value, str):
            assert value_of(of_flags(f"--{key}", str(value).lower()), key) == value
        run = changed({key: value})
        draft = SettingsDraft("run.toml", run)
        validate(draft, None)
        if draft.problems:  # a sample outside of the setting's limits
            continue
        config = RunConfig.model_validate(run)
        write_resolved(config, tmp_path / "written.toml")
        read = tomllib.loads((tmp_path / "written.toml").read_text(encoding="utf-8"))
        if key != "training.micro_batches":  # follows from the two other sizes of the batch
            assert getattr(getattr(RunConfig.model_validate(read), section), name) == value


def test_a_default_that_a_file_cannot_express_is_the_value_of_a_missing_key() -> None:
    """TOML has no null: a written file leaves None out, so None has to be the default wherever it is allowed."""
    models = [*section_models().values()]
    models += [item_model(SETTINGS[key].annotation) for key in ("optimizer.groups", "data.blend")]
    for model in models:
        for name, info in model.model_fields.items():
            if type(None) in getattr(info.annotation, "__args__", ()):
                assert info.default is None, name


TABLES = {
    "optimizer.groups": [{"pattern": "*norm*", "weight_decay": 0.5}, {"pattern": "none"}],
    "data.blend": [{"source": "none", "weight": 1.5}, {"source": ["a", "unset"], "weight": 2.0}],
    "data.curriculum": [{"step": 3, "weights": [1.0, 0.0]}],
    "data.split": [0.5, 0.5],
    "data.source": ["none", "unset"],
    "adapter.targets": ["none", "all"],
}


@pytest.mark.parametrize("key", TABLES)
def test_lists_and_tables_are_the_same_from_python_and_from_a_written_file(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    assert value_of(of_flags(*as_flags({section: {name: TABLES[key]}})), key) == TABLES[key]
    config = RunConfig.model_validate(changed({key: TABLES[key]}))
    write_resolved(config, tmp_path / "written.toml")
    read = tomllib.loads((tmp_path / "written.toml").read_text(encoding="utf-8"))
    assert RunConfig.model_validate(read).model_dump()[section] == config.model_dump()[section]


def test_the_issue_packing_none_is_packing_none(tmp_path: Path) -> None:
    changes = {"data.kind": "instruct", "data.packing": "greedy"}
    assert load(tmp_path, changes, flags=["--data.packing", "none"]).config.data.packing == "none"
    assert load(tmp_path, changes, flags=["--data.packing", "unset"]).config.data.packing == "best_fit"


def test_a_duration_of_a_fraction_of_a_second_is_a_number_on_the_command_line(tmp_path: Path) -> None:
    assert load(tmp_path, flags=["--training.stop_after", "3600.5"]).config.training.stop_after == 3600.5
    assert load(tmp_path, flags=["--training.stop_after", "90m"]).config.training.stop_after == "90m"


def test_none_is_the_value_of_deepspeeds_keys(tmp_path: Path) -> None:
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    key = "--deepspeed.zero_optimization.offload_optimizer.device"
    zero = load(tmp_path, ds_json=offload, flags=[key, "none"]).config.deepspeed_json()["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "none"}


@pytest.mark.parametrize("block", [each for each in KEYS if each])
def test_unset_removes_a_block_of_deepspeeds_json(block: str, tmp_path: Path) -> None:
    table: dict[str, Any] = {"no_such_key": 1}
    for name in reversed(block.split(".")):
        table = {name: table}
    assert any("no_such_key" in str(each) for each in problems(tmp_path, ds_json=table))
    assert not any(
        "no_such_key" in str(each)
        for each in problems(tmp_path, ds_json=table, flags=[f"--deepspeed.{block}", UNSET])
    )


def test_unset_leaves_the_default_where_deepspeeds_json_or_a_preset_has_a_value(tmp_path: Path) -> None:
    ds_json = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}
    assert load(tmp_path, ds_json=ds_json).config.optimizer.gradient_clipping == 0.5
    flags = ["--optimizer.gradient_clipping", UNSET, "--deepspeed.zero_optimization", UNSET]
    config = load(tmp_path, ds_json=ds_json, flags=flags).config
    assert (config.optimizer.gradient_clipping, config.zero_stage) == (1.0, 0)
    run = {"model": {"preset": "phi-3-mini-4k"}, **{name: RUN[name] for name in ("training", "data")}}
    path = write_run(tmp_path, run)
    assert load_run(path).config.model.sliding_window == 2047
    assert load_run(path, ["--model.sliding_window", UNSET]).config.model.sliding_window is None
