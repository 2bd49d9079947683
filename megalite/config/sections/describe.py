"""The schema as text and data: each setting with type, default and description for `--help`, its choices."""

import textwrap
from collections.abc import Collection, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megalite.config.sections.schema import DeepSpeedSection, RunConfig
from megalite.config.sections.section import Section
from megalite.config.sections.toml import format_value

_NAMES = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true | false"}
_INDENT = 30


def section_models() -> dict[str, type[Section]]:
    """Return section name -> model, in the order of RUN.toml."""
    models = {}
    for name, info in RunConfig.model_fields.items():
        [model] = [kind for kind in _members(info.annotation) if kind is not NoneType]
        models[name] = model
    return models


def item_model(annotation: Any) -> type[Section]:
    """Return the model of one table, for a setting that takes a list of tables."""
    [tables] = [kind for kind in _members(annotation) if get_origin(kind) is tuple]
    model: type[Section] = get_args(tables)[0]
    return model


def type_names(annotation: Any) -> list[str]:
    """Return the types a setting takes, INT, NUMBER, TEXT, LIST or "true | false", and the choices of a Literal."""
    names: list[str] = []
    for kind in _members(annotation):
        if get_origin(kind) is Literal:
            names += get_args(kind)
        elif get_origin(kind) is tuple:
            names.append("LIST")
        elif kind is not NoneType:
            names.append(_NAMES[kind])
    return names


def setting(key: str) -> FieldInfo:
    """Return the schema's field of `section.key`, with its default and description."""
    section, name = key.split(".")
    return section_models()[section].model_fields[name]


def describe_keys(width: int = 110, *, sections: Collection[str] | None = None) -> str:
    """Return the keys of `sections` (None: all) with type, default and description, wrapped to `width` columns."""
    lines: list[str] = []
    for section, model in section_models().items():
        if sections is not None and section not in sections:
            continue
        title = (model.__doc__ or "").strip().splitlines()[0]
        lines += ["", *textwrap.wrap(f"[{section}] {title}", width)]
        for key, info in model.model_fields.items():
            lines += _wrapped(f"  --{section}.{key}", _meaning(info), width)
        if model is DeepSpeedSection:
            lines += _wrapped("  --deepspeed.KEY.KEY", "any key of DeepSpeed's JSON", width)
    return "\n".join(lines[1:])


def _meaning(info: FieldInfo) -> str:
    if info.is_required():
        default = "required"
    elif info.default is None:
        default = ""
    else:
        default = f"default {format_value(info.default)}"
    facts = ", ".join(filter(None, (" | ".join(type_names(info.annotation)), default)))
    return f"{info.description} ({facts})"


def _wrapped(name: str, text: str, width: int) -> Iterator[str]:
    room = textwrap.wrap(text, max(20, width - _INDENT))
    first = f"{name:<{_INDENT - 1}} "
    if len(first) > _INDENT:
        yield name
        first = " " * _INDENT
    yield first + room[0]
    yield from (" " * _INDENT + line for line in room[1:])


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, without annotations such as limits."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for each in get_args(annotation) for member in _members(each))
    return (annotation,)
