"""megalite verify --checkpoint A B: what tells two checkpoints apart, tensor by tensor."""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from megalite.cli.arguments import add_value, number_above_zero
from megalite.cli.convert_foreign import add_foreign_flags
from megalite.cli.results import report
from megalite.errors import CheckpointError, counted
from megalite.monitor.work import working

if TYPE_CHECKING:
    from megalite.convert.foreign.checkpoint import ImportOptions
    from megalite.verify.checkpoints import CheckpointComparison
    from megalite.verify.tensor_differences import TensorDifference

_MOST_ROWS, _MOST_LINES = 12, 8


def add_checkpoint_flags(parser: argparse.ArgumentParser, modes: argparse._ActionsContainer) -> None:
    """Add --checkpoint A B to the modes of a command, and the options that belong to it."""
    about = "compare two checkpoints: runs, checkpoints or exports here, or of other programs, in any layout"
    modes.add_argument("--checkpoint", nargs=2, metavar=("A", "B"), help=about)
    about = "with --checkpoint: relative error of a tensor, or of a value, that is no difference"
    add_value(parser, "--tolerance", number_above_zero(), "R", about)
    add_foreign_flags(parser)


def run_checkpoints(options: argparse.Namespace) -> int:
    """Compare options.checkpoint and print the outcome; 0 where they are equal, rounded, or within the tolerance."""
    foreign = _foreign_options(options)
    from megalite.verify.checkpoints import compare_checkpoints

    a, b = options.checkpoint
    with working(f"comparing {a} and {b}"):
        result = compare_checkpoints(a, b, tolerance=options.tolerance or 0.0, options=foreign)
    report(**result.as_dict())
    for line in lines_of(result):
        print(line)
    return result.exit_code


def _foreign_options(options: argparse.Namespace) -> "ImportOptions":
    """Return the statements on a checkpoint that does not describe its model; refuses those that no side takes."""
    from megalite.convert.foreign.checkpoint import ImportOptions
    from megalite.verify.checkpoint_sides import options_taken

    taken = {name for path in options.checkpoint for name in options_taken(path)}
    for name in ("hf_config", "vocab_size"):
        if getattr(options, name) is not None and name not in taken:
            flag = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"both checkpoints say that themselves; leave out {flag}", key=flag)
    return ImportOptions(options.hf_config, options.vocab_size)


def lines_of(result: "CheckpointComparison") -> Iterator[str]:
    """Yield the lines for a person: both sides, what was compared, the verdict, what differs with the worst first."""
    for label, side in (("A", result.a), ("B", result.b)):
        yield f"{label}: {side.path}, {side.described}"
    states = [
        f"{state} ({counted(tensors, 'tensor')}, {numel:,} elements)"
        for state, (tensors, numel) in result.compared.items()
    ]
    if result.scalars_compared:
        states.append(counted(result.scalars_compared, "value") + " beside the tensors")
    yield f"compared: {', '.join(states)}"
    for line in result.not_compared:
        yield f"not compared: {line}"
    for name, count in result.both_nan.items():
        yield f"NaN in both: {counted(count, 'element')} of {name}"
    yield _verdict(result)
    yield from _limited([f"  {each.name}: {each.a} and {each.b}" for each in result.scalars])
    for label in ("A", "B"):
        yield from _limited([f"  only in {label}: {name}" for name in result.only[label]])
    yield from _rounded(result)
    differing = [tensor for tensor in result.differing if tensor.rounded is None]
    if differing:
        yield from _table(_rows(differing[:_MOST_ROWS]))
    if len(differing) > _MOST_ROWS:
        yield f"  and {len(differing) - _MOST_ROWS:,} more tensors, all in --json"
    yield from _limited([line for tensor in differing for line in _remarks(result, tensor)])


def _verdict(result: "CheckpointComparison") -> str:
    tensors = sum(number for number, _ in result.compared.values())
    parts = [f"{len(result.differing):,} of {counted(tensors, 'tensor')}"]
    if result.scalars_compared:
        parts.append(f"{len(result.scalars):,} of {counted(result.scalars_compared, 'value')}")
    if one_sided := sum(map(len, result.only.values())):
        parts.append(f"{counted(one_sided, 'tensor')} on one side only")
    allowed = f", tolerance {result.tolerance:g}" if result.tolerance else ""
    return f"{result.verdict}: {', '.join(parts)} differ{allowed}"


def _limited(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield f"  and {len(lines) - _MOST_LINES:,} more, all in --json"


def _rounded(result: "CheckpointComparison") -> Iterator[str]:
    kinds = Counter((each.rounded, each.dtypes) for each in result.differing if each.rounded is not None)
    for (side, dtypes), number in kinds.items():
        other, dtype = ("B", dtypes[0]) if side == "A" else ("A", dtypes[1])
        yield f"  {counted(number, 'tensor')}: {side} is {other} rounded to {dtype}, every element exactly"
    of_types = [
        each for each in result.differing if each.rounded is None and each.dtypes[0] != each.dtypes[1]
    ]
    if of_types:
        kinds_text = " and ".join(of_types[0].dtypes)
        yield f"  {counted(len(of_types), 'tensor')}: {kinds_text}, and neither is the other rounded"


def _rows(tensors: Sequence["TensorDifference"]) -> Iterator[Sequence[str]]:
    yield "tensor", "state", "differ", "max abs", "relative", "norm", "ulp", "first", "A", "B"
    for each in tensors:
        assert each.first is not None and each.first_values is not None
        figures = (f"{value:.1e}" for value in (each.max_absolute, each.relative, each.norm))
        ulp = "-" if each.ulp is None else f"{each.ulp:,.0f}" if each.ulp < 1e6 else f"{each.ulp:.0e}"
        first = str(list(each.first)).replace(" ", "")
        values = (f"{value:.9g}" for value in each.first_values)
        count = f"{each.differing:,}/{prod(each.shape):,}"
        yield each.name, each.state, count, *figures, ulp, first, *values


def _table(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = (
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(cells)}".rstrip()


def _remarks(result: "CheckpointComparison", tensor: "TensorDifference") -> Iterator[str]:
    """Yield what the numbers suggest."""
    name = f"{tensor.state} of {tensor.name}"
    if (like := result.like.get((tensor.state, tensor.name))) is not None:
        yield f"  {name}: B has the values of A's {like}"
    elif tensor.reordered:
        yield f"  {name}: A and B have the same values in another order, as after a wrong permutation"
