"""The values of a sweep: `KEY=1e-4,3e-4` or `KEY=log:1e-5:1e-2`, their grid, and random draws of them."""

import hashlib
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from megalite.config.flags import COMMAND_LINE
from megalite.config.sections.describe import section_models, type_names
from megalite.config.sections.unchecked import did_you_mean
from megalite.errors import ConfigError, Problem

SCALES = ("log", "lin")
_LONGEST_NAME = 100
_DRAWS_PER_RUN = 100


@dataclass(frozen=True)
class SweptSetting:
    """A setting with its listed values, or with a range.

    key: `section.key`. values: as a flag takes them; empty for a range without a number of points.
    scale: "log" or "lin" for a range from `low` to `high`, else "".
    """

    key: str
    values: tuple[str, ...]
    scale: str = ""
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    def at(self, share: float) -> str:
        """Return the value at a share from 0 to 1 of the range, or of the list of values."""
        if not self.scale:
            return self.values[min(len(self.values) - 1, int(share * len(self.values)))]
        if self.scale == "log":
            number = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            number = self.low + share * (self.high - self.low)
        return str(round(number)) if self.whole else f"{number:.4g}"


def swept_settings(texts: Sequence[str], *, draws: bool) -> tuple[SweptSetting, ...]:
    """Read the arguments of --over. draws: values are drawn, so that a range needs no number of points.

    Raises ConfigError with the problems of all arguments.
    """
    problems: list[Problem] = []
    swept: list[SweptSetting] = []
    for text in texts:
        key, equals, values = text.partition("=")
        try:
            if not equals or not values:
                raise _wrong(key, "has no values", f"write --over {key or 'KEY'}=VALUE,VALUE")
            _require_setting(key)
            if any(key == other.key for other in swept):
                raise _wrong(key, "is swept twice", "list all its values in one --over")
            swept.append(_swept(key, values, draws=draws))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems, COMMAND_LINE)
    return tuple(swept)


def grid(swept: Sequence[SweptSetting]) -> list[dict[str, str]]:
    """Return every combination as key -> value; the last setting changes fastest."""
    return [
        dict(zip((setting.key for setting in swept), values, strict=True))
        for values in product(*(setting.values for setting in swept))
    ]


def drawn(swept: Sequence[SweptSetting], count: int, seed: int) -> list[dict[str, str]]:
    """Return `count` different combinations, drawn independently and uniformly in each list or range.

    A larger count begins with the same ones. Raises ConfigError where there are not so many.
    """
    source = random.Random(seed)
    chosen: dict[tuple[str, ...], None] = {}
    for _ in range(count * _DRAWS_PER_RUN):
        chosen[tuple(setting.at(source.random()) for setting in swept)] = None
        if len(chosen) == count:
            break
    if len(chosen) < count:
        message = f"{count} draws gave only {len(chosen)} different combinations"
        raise ConfigError(
            [Problem("--random", message, f"use {len(chosen)}, or leave it out for the grid")], COMMAND_LINE
        )
    keys = [setting.key for setting in swept]
    return [dict(zip(keys, values, strict=True)) for values in chosen]


def run_names(combinations: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a folder name for each combination, which says its values and depends on nothing else."""
    keys = list(combinations[0]) if combinations else []
    last = [key.split(".")[-1] for key in keys]
    short = {
        key: name if last.count(name) == 1 else key.replace(".", "-")
        for key, name in zip(keys, last, strict=True)
    }
    return [
        _folder_name(",".join(f"{short[key]}={value}" for key, value in values.items()))
        for values in combinations
    ]


def _folder_name(text: str) -> str:
    name = re.sub(r"[^\w=,.+-]", "-", text, flags=re.ASCII)
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _swept(key: str, text: str, *, draws: bool) -> SweptSetting:
    scale, *ends = text.split(":")
    if scale in SCALES and ends:
        return _range(key, scale, ends, draws=draws)
    values = list(_listed(text))
    if "" in values:
        raise _wrong(key, f"{text} has an empty value", "write values with one comma between two")
    if len(set(values)) < len(values):
        raise _wrong(key, f"{text} has a value twice", "list each value once")
    return SweptSetting(key, tuple(values))


def _range(key: str, scale: str, ends: Sequence[str], *, draws: bool) -> SweptSetting:
    form = f"{scale}:LOW:HIGH" + ":POINTS" * (not draws)
    try:
        low, high = float(ends[0]), float(ends[1])
        points = int(ends[2]) if len(ends) > 2 else 0
        if not -math.inf < low < high < math.inf or (scale == "log" and low <= 0) or len(ends) > 3:
            raise ValueError
    except (ValueError, IndexError):
        above = ", LOW above 0" * (scale == "log")
        remedy = f"write {form} with LOW below HIGH{above}, as in {scale}:1e-5:1e-2" + ":4" * (not draws)
        raise _wrong(key, f"{scale}:{':'.join(ends)} is no range", remedy) from None
    whole = _is_whole(key)
    if draws:
        return SweptSetting(key, (), scale, low, high, whole)
    if points < 2:
        remedy = f"write {scale}:{ends[0]}:{ends[1]}:4 for a grid of 4 points, or add --random N"
        raise _wrong(key, "is a range without a number of points (2 or more)", remedy)
    spread = SweptSetting(key, (), scale, low, high, whole)
    values = tuple(dict.fromkeys(spread.at(point / (points - 1)) for point in range(points)))
    return SweptSetting(key, values, scale, low, high, whole)


def _listed(text: str) -> Iterator[str]:
    """Yield the values between the commas outside of brackets and quotes."""
    depth, quote, value = 0, "", ""
    for mark in text:
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        depth += (mark in "[{") - (mark in "]}") if not quote else 0
        if mark == "," and not depth and not quote:
            yield value.strip()
            value = ""
        else:
            value += mark
    yield value.strip()


def _require_setting(key: str) -> None:
    """Raise ConfigError unless a key can be swept."""
    section, _, name = key.partition(".")
    models = section_models()
    if section not in models:
        raise _wrong(key, f"there is no section {section}", did_you_mean(section, models))
    # Keys of DeepSpeed's JSON are DeepSpeed's own.
    if section != "deepspeed" and name.split(".")[0] not in models[section].model_fields:
        raise _wrong(key, "unknown key", did_you_mean(name, models[section].model_fields))
    if key in ("run.folder", "checkpoint.resume"):
        raise _wrong(key, "cannot be swept: each run has a folder of its own", "sweep another setting")


def _is_whole(key: str) -> bool:
    section, _, name = key.partition(".")
    field = section_models()[section].model_fields.get(name)
    names = [] if field is None else type_names(field.annotation)
    return "INT" in names and "NUMBER" not in names


def _wrong(key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(f"--over {key}", message, remedy)], COMMAND_LINE)
