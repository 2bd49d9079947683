"""Tell two checkpoints apart, tensor by tensor: of any layout, ZeRO stage, precision, and of other programs' formats.

Blocks of both are read side by side, so that memory does not grow with the model: less than 200 MB beside the process.
A format that holds a tensor in pieces of its own (Megatron, DeepSpeed, DCP) needs one whole tensor beside that.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any

from megalite.config.sections.shape_settings import as_settings
from megalite.convert.foreign.checkpoint import ImportOptions
from megalite.errors import CheckpointError, listed
from megalite.topology.adapter import Lora
from megalite.topology.shape import ModelShape
from megalite.topology.state import MASTER, WEIGHT
from megalite.verify.checkpoint_sides import CheckpointSide, open_side
from megalite.verify.tensor_differences import TensorComparison, TensorDifference

IDENTICAL, ROUNDED, CLOSE, DIFFERENT = "identical", "rounded", "within tolerance", "different"
PLAIN = ImportOptions()
"""Each checkpoint describes itself."""
# Initial weights depend on it, no computation does.
_FREE_FIELDS = ("model.initializer_range",)
_PATTERNS = ("targets", "modules_to_save")


@dataclass(frozen=True)
class ScalarDifference:
    """A value beside the tensors that differs; None: one side has none."""

    name: str
    a: Any
    b: Any

    def within(self, tolerance: float) -> bool:
        """Whether both are numbers, not whole ones, whose difference is at most `tolerance` of the larger."""
        floats = all(isinstance(value, float) for value in (self.a, self.b))
        return floats and math.isclose(self.a, self.b, rel_tol=tolerance)


@dataclass
class CheckpointComparison:
    """The outcome: what both are, what was compared, what differs with the worst first, and what was not compared.

    compared: state key -> its tensors and elements. tensors: those that differ in values or types. only: state and name
    of tensors that one side has. like: a differing tensor of B -> the other tensor of A whose values it has.
    """

    a: CheckpointSide
    b: CheckpointSide
    tolerance: float
    compared: dict[str, tuple[int, int]] = field(default_factory=dict)
    tensors: list[TensorDifference] = field(default_factory=list)
    scalars: list[ScalarDifference] = field(default_factory=list)
    scalars_compared: int = 0
    only: dict[str, list[str]] = field(default_factory=lambda: {"A": [], "B": []})
    not_compared: list[str] = field(default_factory=list)
    like: dict[tuple[str, str], str] = field(default_factory=dict)
    both_nan: dict[str, int] = field(default_factory=dict)

    @property
    def differing(self) -> list[TensorDifference]:
        """The tensors that differ in values, the worst first: those that are not rounded, by relative error."""
        wrong = [tensor for tensor in self.tensors if tensor.differing]
        return sorted(wrong, key=lambda tensor: (tensor.rounded is not None, -tensor.relative))

    @property
    def verdict(self) -> str:
        """One of IDENTICAL, ROUNDED, CLOSE, DIFFERENT: the worst of all tensors and scalars."""
        kinds = [self._of_tensor(tensor) for tensor in self.differing]
        kinds += [CLOSE if scalar.within(self.tolerance) else DIFFERENT for scalar in self.scalars]
        kinds += [DIFFERENT] if any(self.only.values()) else []
        order = (IDENTICAL, ROUNDED, CLOSE, DIFFERENT)
        return max(kinds, key=order.index, default=IDENTICAL)

    @property
    def exit_code(self) -> int:
        """0 unless something differs by more than rounding and tolerance."""
        return int(self.verdict == DIFFERENT)

    def _of_tensor(self, tensor: TensorDifference) -> str:
        if tensor.rounded is not None:
            return ROUNDED
        return CLOSE if tensor.relative <= self.tolerance else DIFFERENT

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        sides = {"a": self.a, "b": self.b}
        return {
            "verdict": self.verdict,
            "tolerance": self.tolerance,
            **{
                name: {"folder": str(side.path), "format": side.described, "family": side.shape.family}
                for name, side in sides.items()
            },
            "compared": {
                state: {"tensors": tensors, "elements": numel}
                for state, (tensors, numel) in self.compared.items()
            },
            "tensors": [
                {**tensor.as_dict(), "like": self.like.get((tensor.state, tensor.name))}
                for tensor in [*self.differing, *(each for each in self.tensors if not each.differing)]
            ],
            "scalars_compared": self.scalars_compared,
            "scalars": [vars(scalar) for scalar in self.scalars],
            "only": self.only,
            "both_nan": self.both_nan,
            "not_compared": self.not_compared,
        }


def compare_checkpoints(
    a: str,
    b: str,
    *,
    tolerance: float = 0.0,
    options: ImportOptions = PLAIN,
) -> CheckpointComparison:
    """Compare two checkpoints: all states and scalars that both record, weights alone where one has no more.

    a, b: as `open_side` takes them. tolerance: of relative errors. options: what formats that take them are told.
    Raises CheckpointError where one cannot be read, or both are of different models.
    """
    with ExitStack() as stack:
        one, other = (stack.enter_context(open_side(path, options)) for path in (a, b))
        one, other = _alike(one, other, stack)
        _require_one_model(one, other)
        result = CheckpointComparison(one, other, tolerance)
        _compare_scalars(result)
        contents = dict[tuple[str, str], tuple[Hashable, Hashable] | None]()
        for state, pairs in _pairs(one, other, result):
            numel = sum(prod(one.states[keys[0]][name]) for name, keys in pairs.items())
            result.compared[state] = len(pairs), numel
            for name, keys in pairs.items():
                contents[state, name] = _compare_tensor(result, state, name, keys)
        result.like.update(_likenesses(result.differing, contents))
        return result


def _alike(
    one: CheckpointSide, other: CheckpointSide, stack: ExitStack
) -> tuple[CheckpointSide, CheckpointSide]:
    """Merge a low-rank adapter into its base where only one side has an adapter."""
    sides = [one, other]
    if (one.shape.adapter is None) != (other.shape.adapter is None):
        at = int(one.shape.adapter is None)
        if isinstance(sides[at].shape.adapter, Lora):
            sides[at] = sides[at].merged()
            stack.enter_context(sides[at].reader)
    return sides[0], sides[1]


def _require_one_model(one: CheckpointSide, other: CheckpointSide) -> None:
    a, b = one.states[WEIGHT], other.states[WEIGHT]
    shared = a.keys() & b.keys()
    layers = {side.shape.num_hidden_layers for side in (one, other)}
    families = {side.shape.family for side in (one, other)}
    alike = all(a[name] == b[name] for name in shared) and (len(families) == 1 or a.keys() == b.keys())
    if shared and alike and len(layers) == 1:
        return
    settings = [f"{each.name} is {each.a} and {each.b}" for each in _model_settings(one, other)]
    raise CheckpointError(
        f"{one.path} and {other.path} hold different models, whose tensors cannot be compared: {listed(settings)};"
        " name two checkpoints of one model"
    )


def _model_settings(one: CheckpointSide, other: CheckpointSide) -> Iterator[ScalarDifference]:
    a, b = _settings_of(one.shape), _settings_of(other.shape)
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name) and name not in _FREE_FIELDS:
            yield ScalarDifference(name, a.get(name), b.get(name))


def _settings_of(shape: ModelShape) -> dict[str, Any]:
    """Return the settings of a model and its adapter, but for the patterns that chose the adapted tensors."""
    settings = {
        f"model.{name}": value for name, value in as_settings(vars(shape)).items() if name != "adapter"
    }
    adapter = {} if shape.adapter is None else vars(shape.adapter)
    return settings | {f"adapter.{name}": value for name, value in adapter.items() if name not in _PATTERNS}


def _compare_scalars(result: CheckpointComparison) -> None:
    """Compare what both know; where both are megalite's, a scalar of one alone is a difference."""
    one, other = result.a, result.b
    result.scalars.extend(_model_settings(one, other))
    both_own = one.own and other.own
    names = [
        name
        for name in dict.fromkeys((*one.scalars, *other.scalars))
        if both_own or (name in one.scalars and name in other.scalars)
    ]
    values = [ScalarDifference(name, one.scalars.get(name), other.scalars.get(name)) for name in names]
    result.scalars.extend(each for each in values if _plain(each.a) != _plain(each.b))
    result.scalars_compared += len(names)
    if not names:
        result.not_compared.append("step, position in the data and settings: one side does not record them")


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _pairs(
    one: CheckpointSide, other: CheckpointSide, result: CheckpointComparison
) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Yield each state with name -> its state key in A and in B; notes tensors and states of one side alone.

    Where one side alone has float32 masters, they are compared with the weights of the other.
    """
    both_own = one.own and other.own
    for state in dict.fromkeys((*one.states, *other.states)):
        if state == MASTER and not both_own:
            continue
        exact = state == MASTER or (state == WEIGHT and not both_own)
        names = dict.fromkeys(name for side in (one, other) for name in side.states.get(state, ()))
        keys = {name: (one.exact(name), other.exact(name)) if exact else (state, state) for name in names}
        held_a, held_b = (
            {name for name in names if name in side.states.get(keys[name][at], {})}
            for at, side in enumerate((one, other))
        )
        if not both_own and not (held_a and held_b):
            result.not_compared.append(
                f"{state} of {'A' if held_a else 'B'}: the other side does not hold it"
            )
            continue
        result.only["A"].extend(f"{state} of {name}" for name in names if name not in held_b)
        result.only["B"].extend(f"{state} of {name}" for name in names if name not in held_a)
        yield state, {name: keys[name] for name in names if name in held_a & held_b}
    for label, side in (("A", one), ("B", other)):
        if not both_own and MASTER in side.states:
            result.not_compared.append(f"rounded weights of {label}: its float32 masters were compared")


def _compare_tensor(
    result: CheckpointComparison, state: str, name: str, keys: tuple[str, str]
) -> tuple[Hashable, Hashable] | None:
    """Add the outcome of one tensor, if there is something to say; return what `TensorComparison.contents` does."""
    one, other = result.a, result.b
    comparison = TensorComparison(one.states[keys[0]][name])
    for blocks in zip(one.blocks(keys[0], name), other.blocks(keys[1], name), strict=True):
        comparison.add(*blocks)
    found = comparison.result(state, name)
    if found.differing or found.dtypes[0] != found.dtypes[1]:
        result.tensors.append(found)
    if found.both_nan:
        result.both_nan[f"{state} of {name}"] = found.both_nan
    return comparison.contents


def _likenesses(
    differing: Sequence[TensorDifference],
    contents: Mapping[tuple[str, str], tuple[Hashable, Hashable] | None],
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield (state, name) of each differing tensor of B, and the differing tensor of A with just its values."""
    hashes = [(each, contents[each.state, each.name]) for each in differing]
    of_a = {(each.state, each.shape, of[0]): each.name for each, of in hashes if of is not None}
    for each, of in hashes:
        name = None if of is None else of_a.get((each.state, each.shape, of[1]))
        if name is not None and name != each.name:
            yield (each.state, each.name), name
