"""The certificate of a verification: a verdict, what it is worth, and what was not checked; JSON and plain text."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from errno import EISDIR
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megalite.config.flags import COMMAND_LINE
from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, Problem, listed, write_remedy
from megalite.verify.findings import (
    INITIAL,
    LOSS,
    NORM,
    OUTPUT,
    OWN,
    STATE,
    SUMMED,
    UPDATED,
    Departure,
    LayoutComparison,
)
from megalite.version import __version__

_PACKAGES = ("torch", "deepspeed", "numpy")
# After which operation of a step a quantity is what it is.
_AFTER = {
    INITIAL: "before the first step",
    OUTPUT: "in the forward",
    LOSS: "after the forward",
    OWN: "after the backward",
    SUMMED: "after the sum over the ranks with the same weights",
    NORM: "after the sum of the squares over all ranks",
    STATE: "after the optimizer's step",
    UPDATED: "after the optimizer's step",
}


@dataclass(frozen=True)
class Certificate:
    """The findings of a verification, and what they are bound to.

    bounds: quantity -> the largest relative error of a correct run. worst: quantity -> error, tensor, step, and the
    number of tensors and values that were compared. departures: those of the first step with one; the first of them is
    the verdict's. changed: settings that verification changed. unchecked: what this certificate says nothing about.
    """

    config_sha256: str
    layout: str
    axes: Mapping[str, int]
    ranks: Sequence[str]
    steps: int
    precision: str
    full_size: bool
    bounds: Mapping[str, float]
    worst: Mapping[str, Mapping[str, Any]]
    departures: Sequence[Departure]
    copies: str
    documents: int
    leaks: Sequence[str]
    changed: Sequence[str]
    unchecked: Sequence[str]
    operators: Mapping[str, str]
    kernels: str
    device: str
    versions: Mapping[str, str] = field(default_factory=lambda: versions())
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.departures and not self.copies and not self.leaks

    @property
    def departure(self) -> str:
        """The first departure in one sentence; empty where there is none."""
        if self.departures:
            return _described(self.departures[0], self.ranks)
        if self.copies:
            return f"copies of one tensor differ: {self.copies}"
        return f"a document sees another one: {self.leaks[0]}" if self.leaks else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the values of the JSON; numbers that are not finite are null there."""
        values = json.dumps({"holds": self.holds, "departure": self.departure, **asdict(self)})
        read: dict[str, Any] = json.loads(values, parse_constant=lambda _: None)
        return read

    def write(self, path: Path) -> Path:
        """Write the JSON, and the text beside it; return the text's path. ConfigError where that cannot be done."""
        return write_certificate(path, self.as_dict(), self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the certificate for people."""
        if self.holds:
            yield f"holds: {self.layout} trains as one process does, over {self.steps} steps in {self.precision}"
        else:
            yield f"departs: {self.departure}"
            yield from (f"  then {_described(each, self.ranks)}" for each in self.departures[1:4])
            if len(self.departures) > 4:
                yield f"  and {len(self.departures) - 4} more in this step"
        yield ""
        yield f"{'quantity':<28}{'worst error':>12}{'allowed':>10}{'tensors':>9}  where"
        for quantity, found in self.worst.items():
            where = (
                f"{found['name']}{', ' if found['name'] else ''}step {found['step']}"
                if found["error"]
                else ""
            )
            error, allowed = f"{found['error']:.1e}", f"{found['allowed']:.0e}"
            yield f"{quantity:<28}{error:>12}{allowed:>10}{found['tensors']:>9}  {where}".rstrip()
        copies = self.copies or "equal"
        yield f"copies on several ranks: {copies}"
        if self.documents:
            seen = self.leaks[0] if self.leaks else "none sees another"
            yield f"documents that share a row: {self.documents}, {seen}"
        yield ""
        if self.changed:
            yield "changed for this verification:"
            yield from (f"  {line}" for line in self.changed)
        yield "not checked:"
        yield from (f"  {line}" for line in self.unchecked)
        yield ""
        yield f"settings: sha256 {self.config_sha256}"
        yield f"operators: {self.kernels}; device: {self.device}"
        yield ", ".join(f"{name} {number}" for name, number in self.versions.items())


def write_certificate(path: Path, content: Mapping[str, Any], lines: Iterator[str]) -> Path:
    """Write JSON, and text beside it; return the text's path. ConfigError where that cannot be done."""
    text = path.with_suffix(".txt")
    contents = {path: json.dumps(content, indent=2), text: "\n".join(lines)}
    partial = {file: file.with_name(f"{file.name}.partial") for file in contents}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, written in contents.items():
            partial[file].write_text(f"{written}\n", encoding="utf-8")
        for file in contents:
            partial[file].replace(file)
    except OSError as error:
        for file in partial.values():
            with suppress(OSError):
                file.unlink(missing_ok=True)
        raise _unwritable(path, error) from error
    return text


def require_place(path: Path) -> None:
    """Raise ConfigError where no certificate can be written to `path`; makes its folder."""
    if path.suffix != ".json":
        rule = f"{path} does not end in .json; the text for people is written beside it"
        raise ConfigError([Problem("--output", rule, f"use {path.with_suffix('.json')}")], COMMAND_LINE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for taken in (path, path.with_suffix(".txt")):
            if taken.is_dir():
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    remedy = write_remedy(error, full="free space there, or name another file") or "name another file"
    problem = Problem("--output", f"{path} cannot be written ({error.strerror})", remedy)
    return ConfigError([problem], COMMAND_LINE)


def config_sha256(config: RunConfig) -> str:
    """Return the hash of all settings of a resolved run but run.folder."""
    values = config.model_dump(mode="json")
    values["run"].pop("folder")
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of what computes; packages that are not here are left out."""
    found = {"megalite": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def worst_of(comparison: LayoutComparison) -> dict[str, dict[str, Any]]:
    return {quantity: asdict(worst) for quantity, worst in comparison.worst.items()}


def _described(departure: Departure, ranks: Sequence[str]) -> str:
    quantity = STATE if departure.quantity.startswith(STATE) else departure.quantity
    what = f"{departure.quantity} of {departure.name}" if departure.name else departure.quantity
    where = f", on {listed([ranks[rank] for rank in departure.ranks], most=8)}" if departure.ranks else ""
    if len(departure.ranks) == len(ranks) > 1:
        where = ", on every rank"
    when = f"step {departure.step}" if departure.step else "the start"
    after = _AFTER[quantity]
    if departure.note:
        return f"{what}, {when}, {after}: {departure.note}"
    size = f"relative error {departure.error:.1e}, allowed {departure.bound:.0e}"
    if departure.place or departure.quantity in (LOSS, NORM):
        place = f" at {list(departure.place)}" if departure.place else ""
        size += f"; {departure.value!r}{place}, not {departure.expected!r}: {departure.ulps:.3g} ulp"
    return f"{what}, {when}, {after}{where}: {size}"
