"""Check a draft against the schema: a Problem for each wrong value, and the valid ones for the rules."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megalite.config.sections.checked import CheckedRun, KnownValues
from megalite.config.sections.describe import item_model, section_models
from megalite.config.sections.section import Section
from megalite.config.sections.toml import parse_value, shown
from megalite.config.sections.unchecked import DERIVED, SettingsDraft, closest_name, did_you_mean
from megalite.errors import Problem

# pydantic's name of a type -> ours.
_WORDS = {
    "tuple": "a list",
    "integer": "a whole number",
    "string": "text",
    "boolean": "true or false",
    "number": "a number",
    "dictionary or instance of BlendPart": "a table",
    "dictionary or instance of CurriculumPart": "a table",
    "String should have at least 1 character": "text that is not empty",
}
# pydantic's type of a broken bound -> ours, behind "a whole number" where a setting takes something else too.
_BOUNDS = {
    "greater_than_equal": "of at least",
    "greater_than": "above",
    "less_than_equal": "of at most",
    "less_than": "below",
}
_EPOCHS = 'epochs as in "1 epoch"'
# Setting that takes a number or text -> the form of the text.
_FORMS = {
    "validation.every": _EPOCHS,
    "checkpoint.every": _EPOCHS,
    "training.stop_after": 'a duration as in "23h30m"',
}


def validate(draft: SettingsDraft, world_size: int | None) -> CheckedRun:
    """Check each section on its own and add its problems to the draft; return the valid settings."""
    models = section_models()
    for name in draft.values.keys() - models.keys():
        draft.problems.append(_unknown_section(name, draft.values[name], models))
    sections = {name: _known_values(draft, name, model) for name, model in models.items()}
    deepspeed = draft.values.get("deepspeed")
    settings: dict[str, Any] = {
        name: KnownValues(values)
        for name, values in sections.items()
        if name in CheckedRun.__dataclass_fields__
    }
    return CheckedRun(
        **settings
        | {
            "deepspeed": deepspeed if isinstance(deepspeed, Mapping) else {},
            "world_size": world_size,
            "origins": draft.origins,
            "incomplete": draft.incomplete,
        }
    )


def _known_values(draft: SettingsDraft, name: str, model: type[Section]) -> dict[str, Any]:
    """Return the section's valid values, defaults included; add a problem to the draft for each other one."""
    raw = draft.values.get(name, {})
    if not isinstance(raw, dict):
        draft.problem(name, f"is {shown(raw)}, but should be a section", f"write [{name}] and keys below it")
        return {}
    try:
        return dict(model.model_validate(raw))
    except ValidationError as error:
        wrong: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            wrong.setdefault(str(detail["loc"][0]), []).append(detail)
    for key, errors in wrong.items():
        in_tables = [detail for detail in errors if _is_in_table(detail)]
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
    """Convert a valid value as the model would: a list to a tuple, an int to a float where the field is one."""
    annotated: Any = Annotated[info.annotation, info]
    return TypeAdapter(annotated).validate_python(value)


# The run.toml of earlier runs has every setting of its version.
_REMOVED = {
    "data.check_document_mask": "delete the line: the tests of megalite check document masks",
    "monitor.tensorboard": 'write monitor.report_to = ["tensorboard"] in place of true, and nothing in place of false',
}


def _problem(
    draft: SettingsDraft, section: str, key: str, model: type[Section], errors: list[ErrorDetails]
) -> Problem:
    full = f"{section}.{key}"
    if _is_missing(errors):
        return Problem(full, f"is required ({model.model_fields[key].description})")
    if full in _REMOVED:
        return Problem.reset(full, "is no longer a setting", _REMOVED[full])
    value = draft.values[section][key]
    if key not in model.model_fields:
        close = _nearest_key(section, key)
        remedy, cure = (f"did you mean {close}?", {close: value, full: None}) if close else ("", {full: None})
        return Problem(full, "unknown key", remedy, cure)
    origin = draft.origin(full)
    where = "" if origin in (draft.source, DERIVED) else f" ({origin})"
    rules = " or ".join(
        _FORMS.get(full, rule) if rule == "text" else rule for rule in dict.fromkeys(_rules(errors))
    )
    rules = rules.replace("true or false or", "true, false or")
    words = [word for each in errors for word in _words(each)]
    close = closest_name(value, words) if isinstance(value, str) else ""
    remedy = f"did you mean {close}?" if close else ""
    cure = {full: close} if close else _nearest_value(full, value, model.model_fields[key], errors)
    return Problem(full, f"{shown(value)}{where} should be {rules}", remedy, cure)


def _nearest_value(key: str, value: Any, info: FieldInfo, errors: list[ErrorDetails]) -> dict[str, Any]:
    """Return key -> the number that is written as text, or the bound that a number breaks; {} for other mistakes."""
    candidates = [parse_value(value)] if isinstance(value, str) else []
    candidates += [bound for error in errors for bound in error.get("ctx", {}).values()]
    for candidate in candidates:
        with suppress(ValidationError):
            _converted(info, candidate)
            return {key: candidate}
    return {}


def _is_in_table(error: ErrorDetails) -> bool:
    """Whether the error is about a key inside a list of tables ([[section.key]])."""
    return len(error["loc"]) > 2 and isinstance(error["loc"][1], int) and isinstance(error["loc"][2], str)


def _table_problems(
    draft: SettingsDraft, section: str, info: FieldInfo, errors: list[ErrorDetails]
) -> Iterator[Problem]:
    wrong: dict[tuple[str, int, str], list[ErrorDetails]] = {}
    for detail in errors:
        key, place, name = detail["loc"][:3]
        assert isinstance(place, int)
        wrong.setdefault((str(key), place, str(name)), []).append(detail)
    for (key, place, name), about in wrong.items():
        full = f"{section}.{key}[{place + 1}].{name}"
        known = item_model(info.annotation).model_fields
        if about[0]["type"] == "missing":
            yield Problem(full, f"is required ({known[name].description})")
        elif name not in known:
            yield Problem(full, "unknown key", did_you_mean(name, known) or f"there are {', '.join(known)}")
        else:
            rules = " or ".join(
                dict.fromkeys(_rules([{**detail, "loc": detail["loc"][3:]} for detail in about]))
            )
            yield Problem(full, f"{shown(draft.values[section][key][place][name])} should be {rules}")


def _is_missing(errors: list[ErrorDetails]) -> bool:
    """Whether the key itself is missing, rather than an item of its list."""
    return errors[0]["type"] == "missing" and len(errors[0]["loc"]) == 1


def _rules(errors: list[ErrorDetails]) -> Iterator[str]:
    """Yield pydantic's rules: one for each member of a union, and only the first that concerns a list's items."""
    in_list = [each for each in errors if any(isinstance(place, int) for place in each["loc"])]
    for error in [each for each in errors if each not in in_list] + in_list[:1]:
        rule = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
        rule = _WORDS.get(rule, rule) if error["type"] != "literal_error" else rule.replace("'", '"')
        if error["type"] in _BOUNDS and len(errors) > 1:
            noun = "a whole number" if str(error["loc"][-1]).endswith("int") else "a number"
            rule = f"{noun} {_BOUNDS[error['type']]} {rule.rpartition(' ')[2]}"
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
    """Yield the choices of a Literal, taken from pydantic's message."""
    if error["type"] == "literal_error":
        yield from error["msg"].split("'")[1::2]


def _nearest_key(section: str, key: str) -> str:
    """Return the setting that is meant by an unknown key of a section; "" where none is close."""
    models = section_models()
    elsewhere = [name for name, model in models.items() if key in model.model_fields]
    if elsewhere:
        return f"{elsewhere[0]}.{key}"
    return closest_name(key, [f"{section}.{name}" for name in models[section].model_fields])


def _unknown_section(name: str, value: Any, models: Mapping[str, type[Section]]) -> Problem:
    if isinstance(value, Mapping):
        close = closest_name(name, models)
        remedy = f"did you mean {close}?" if close else f"there are {', '.join(models)}"
        moved = {f"{close}.{key}": inner for key, inner in value.items()} if close else {}
        return Problem(name, "unknown section", remedy, moved | {f"{name}.{key}": None for key in value})
    homes = [f"{section}.{name}" for section, model in models.items() if name in model.model_fields]
    if homes:
        return Problem(name, "is outside of any section", f"did you mean {homes[0]}?")
    every = [f"{section}.{key}" for section, model in models.items() for key in model.model_fields]
    return Problem(name, "unknown key", did_you_mean(name, every))
