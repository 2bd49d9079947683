"""The draft against the schema: every wrong value as a Problem, and what is right as facts for the rules."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megalite.config.describe import item_model, section_models
from megalite.config.draft import DERIVED, Draft, did_you_mean
from megalite.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Section,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megalite.config.toml import shown
from megalite.errors import Problem

# pydantic's words -> plain ones.
_WORDS = {
    "tuple": "a list",
    "integer": "a whole number",
    "string": "text",
    "boolean": "true or false",
    "number": "a number",
    "dictionary or instance of BlendPart": "a table",
    "String should have at least 1 character": "text that is not empty",
}


class Unknown(Exception):
    """A setting that is wrong or missing, which is reported already; a rule that needs it says nothing."""


class _Known:
    """Stands for a section of which only some values are right: reading another one raises Unknown."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise Unknown(name) from None


@dataclass(frozen=True)
class Facts:
    """What is known of a run, for the rules that span settings. Reading a wrong value raises Unknown."""

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    deepspeed: Mapping[str, Any]
    """native_optimizer and what is passed on to DeepSpeed; empty without [deepspeed]."""
    world_size: int | None
    """Ranks that a launcher started; None when megalite starts its own."""
    origins: Mapping[str, str]
    incomplete: Collection[str]
    """Sections of which a part could not be read."""

    def source(self, key: str) -> str:
        """`(where section.key came from)`, for a message."""
        return f"({self.origins.get(key, 'default')})"

    @property
    def zero_stage(self) -> int:
        zero = self.deepspeed.get("zero_optimization", {})
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
        if isinstance(stage, bool) or not isinstance(stage, int):
            raise Unknown("deepspeed.zero_optimization.stage")
        return stage


def validate(draft: Draft, world_size: int | None) -> Facts:
    """Check every section on its own, adding problems to the draft; return what can be relied on."""
    models = section_models()
    for name in draft.values.keys() - models.keys():
        draft.problems.append(_unknown_section(name, draft.values[name], models))
    sections = {name: _known_values(draft, name, model) for name, model in models.items()}
    deepspeed = draft.values.get("deepspeed")
    return Facts(
        model=cast(ModelConfig, _Known(sections["model"])),
        parallel=cast(ParallelConfig, _Known(sections["parallel"])),
        training=cast(TrainingConfig, _Known(sections["training"])),
        optimizer=cast(OptimizerConfig, _Known(sections["optimizer"])),
        tokenizer=cast(TokenizerConfig, _Known(sections["tokenizer"])),
        data=cast(DataConfig, _Known(sections["data"])),
        validation=cast(ValidationConfig, _Known(sections["validation"])),
        checkpoint=cast(CheckpointConfig, _Known(sections["checkpoint"])),
        deepspeed=deepspeed if isinstance(deepspeed, Mapping) else {},
        world_size=world_size,
        origins=draft.origins,
        incomplete=draft.incomplete,
    )


def _known_values(draft: Draft, name: str, model: type[Section]) -> dict[str, Any]:
    """The section's values that are right, defaults included; problems for the others."""
    raw = draft.values.get(name, {})
    if not isinstance(raw, dict):
        draft.problem(
            name, f"{shown(raw)} stands where a section should", f"write [{name}] and keys below it"
        )
        return {}
    try:
        return dict(model.model_validate(raw))
    except ValidationError as error:
        wrong: dict[str, list[ErrorDetails]] = {}
        for each in error.errors(include_url=False):
            wrong.setdefault(str(each["loc"][0]), []).append(each)
    for key, errors in wrong.items():
        in_tables = [each for each in errors if _is_in_table(each)]
        if in_tables:
            draft.problems += _table_problems(draft, name, model.model_fields[key], in_tables)
        elif not (_is_missing(errors) and name in draft.incomplete):
            draft.problems.append(_problem(draft, name, key, model, errors))
    right = {}
    for key, info in model.model_fields.items():
        if key not in wrong:
            right[key] = _converted(info, raw[key]) if key in raw else info.default
    return right


def _converted(info: FieldInfo, value: Any) -> Any:
    """A value that is right, as its model holds it: lists as tuples, whole numbers as floats."""
    annotated: Any = Annotated[info.annotation, info]
    return TypeAdapter(annotated).validate_python(value)


def _problem(
    draft: Draft, section: str, key: str, model: type[Section], errors: list[ErrorDetails]
) -> Problem:
    full = f"{section}.{key}"
    if _is_missing(errors):
        return Problem(full, f"is required ({model.model_fields[key].description})")
    if key not in model.model_fields:
        return Problem(full, "unknown key", _nearest_key(section, key))
    value = draft.values[section][key]
    origin = draft.origin(full)
    where = "" if origin in (draft.source, DERIVED) else f" ({origin})"
    rules = " or ".join(dict.fromkeys(_rules(errors)))
    words = [word for each in errors for word in _words(each)]
    remedy = did_you_mean(value, words) if isinstance(value, str) else ""
    return Problem(full, f"{shown(value)}{where} should be {rules}", remedy)


def _is_in_table(error: ErrorDetails) -> bool:
    """Whether it is about a key in one of a list of tables ([[section.key]])."""
    return len(error["loc"]) > 2 and isinstance(error["loc"][1], int) and isinstance(error["loc"][2], str)


def _table_problems(
    draft: Draft, section: str, info: FieldInfo, errors: list[ErrorDetails]
) -> Iterator[Problem]:
    wrong: dict[tuple[str, int, str], list[ErrorDetails]] = {}
    for each in errors:
        key, place, name = each["loc"][:3]
        assert isinstance(place, int)
        wrong.setdefault((str(key), place, str(name)), []).append(each)
    for (key, place, name), about in wrong.items():
        full = f"{section}.{key}[{place + 1}].{name}"
        known = item_model(info.annotation).model_fields
        if about[0]["type"] == "missing":
            yield Problem(full, f"is required ({known[name].description})")
        elif name not in known:
            yield Problem(full, "unknown key", did_you_mean(name, known) or f"there are {', '.join(known)}")
        else:
            rules = " or ".join(dict.fromkeys(_rules([{**each, "loc": each["loc"][3:]} for each in about])))
            yield Problem(full, f"{shown(draft.values[section][key][place][name])} should be {rules}")


def _is_missing(errors: list[ErrorDetails]) -> bool:
    """Whether it is the key itself that is missing, and not an item of its list."""
    return errors[0]["type"] == "missing" and len(errors[0]["loc"]) == 1


def _rules(errors: list[ErrorDetails]) -> Iterator[str]:
    """What pydantic asks for, of a value each way it could be right, of a list's items only the first."""
    in_list = [each for each in errors if any(isinstance(place, int) for place in each["loc"])]
    for error in [each for each in errors if each not in in_list] + in_list[:1]:
        rule = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
        rule = _WORDS.get(rule, rule) if error["type"] != "literal_error" else rule.replace("'", '"')
        place = [each + 1 for each in error["loc"] if isinstance(each, int)]
        key = error["loc"][-1] if place and isinstance(error["loc"][-1], str) else None
        if key is not None and error["type"] in ("missing", "extra_forbidden"):
            has = "has" if error["type"] == "missing" else "does not have the unknown key"
            yield f"a list whose item {place[0]} {has} {key}"
        elif key is not None:
            yield f"a list whose item {place[0]} has {key} {rule}"
        elif error["type"] == "too_long":
            yield f"a list of {error['ctx']['max_length']}"
        elif place and error["type"] == "missing":
            yield f"a list with an item {place[0]}"
        else:
            yield f"a list whose item {place[0]} is {rule}" if place else rule


def _words(error: ErrorDetails) -> Iterator[str]:
    """The words of a Literal, from the message that quotes them."""
    if error["type"] == "literal_error":
        yield from error["msg"].split("'")[1::2]


def _nearest_key(section: str, key: str) -> str:
    models = section_models()
    elsewhere = [name for name, model in models.items() if key in model.model_fields]
    if elsewhere:
        return f"did you mean {elsewhere[0]}.{key}?"
    return did_you_mean(key, [f"{section}.{name}" for name in models[section].model_fields])


def _unknown_section(name: str, value: Any, models: Mapping[str, type[Section]]) -> Problem:
    if isinstance(value, Mapping):
        return Problem(
            name, "unknown section", did_you_mean(name, models) or f"there are {', '.join(models)}"
        )
    homes = [f"{section}.{name}" for section, model in models.items() if name in model.model_fields]
    if homes:
        return Problem(name, "stands outside of a section", f"did you mean {homes[0]}?")
    every = [f"{section}.{key}" for section, model in models.items() for key in model.model_fields]
    return Problem(name, "unknown key", did_you_mean(name, every))
