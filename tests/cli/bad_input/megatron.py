"""Damaged and unfit Megatron-LM checkpoints: megalite convert import and inspect."""

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.cli.bad_input.case import Case
from tests.support.megatron_writer import Written, write_megatron
from tests.support.tiny import tiny_shape

RANK = "mp_rank_01/model_optim_rng.pt"


@cache
def _pristine() -> tempfile.TemporaryDirectory[str]:
    """A small Llama on two ranks; removed when the process ends."""
    import torch

    from megalite.topology.parameters import canonical_tensors

    folder, shape = tempfile.TemporaryDirectory(), tiny_shape(layers=2)
    weights = {name: torch.ones(size) for name, size in canonical_tensors(shape).items()}
    write_megatron(Path(folder.name), shape, weights, Written(2))
    return folder


def after(
    spoil: Callable[[Path], object], *command: str, flags: tuple[str, ...] = ()
) -> Callable[[Path], list[str]]:
    """The command (import, unless it is given) on the folder of the iteration after `spoil`."""

    def make(world: Path) -> list[str]:
        folder = Path(shutil.copytree(_pristine().name, world / "megatron"))
        spoil(folder / "iter_0001000")
        output = [] if command else [str(world / "imported")]
        return ["convert", *(command or ("import",)), str(folder), *output, *flags]

    return make


def content(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Both ranks' files with what `change` makes of them."""

    def spoil(iteration: Path) -> None:
        import torch

        for path in iteration.glob("*/*.pt"):
            held = torch.load(path, weights_only=False)
            change(held)
            torch.save(held, path)

    return spoil


def cut_short(iteration: Path) -> None:
    (iteration / RANK).write_bytes((iteration / RANK).read_bytes()[:5000])


def of_another_iteration(iteration: Path) -> None:
    import torch

    held = torch.load(iteration / RANK, weights_only=False)
    torch.save(held | {"iteration": 900}, iteration / RANK)


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("echo run > somewhere",)


CASES = [
    Case("a rank's file that is missing", after(lambda it: (it / RANK).unlink()), (RANK, "fetch every rank")),
    Case("a rank's file cut short", after(cut_short), (RANK, "fetch or write it again")),
    Case("files of two iterations", after(of_another_iteration), (RANK, "iteration 900", "of one iteration")),
    Case(
        "another number of tensor ranks",
        after(content(lambda held: setattr(held["args"], "tensor_model_parallel_size", 4))),
        ("tensor_model_parallel_size = 4", "2 rank(s)"),
    ),
    Case(
        "an activation that is not built",
        after(content(lambda held: setattr(held["args"], "squared_relu", True))),
        ("squared_relu = True",),
    ),
    Case(
        "a pickle that would run something",
        after(content(lambda held: held.update(optimizer=Runs()))),
        ("posix.system", "no code was run", "save it again"),
    ),
    Case(
        "a pickle that would run something, looked into",
        after(content(lambda held: held.update(optimizer=Runs())), "inspect"),
        ("posix.system", "save it again"),
    ),
    Case(
        "a padded vocabulary of unknown size",
        after(content(lambda held: setattr(held["args"], "vocab_size", None))),
        ("padded to 128 rows", "--vocab-size"),
    ),
    Case(
        "more tokens than rows",
        after(lambda _: None, flags=("--vocab-size", "500")),
        ("128 rows", "500 tokens"),
    ),
    Case(
        "a tokenizer's size for another kind of folder",
        lambda world: ["convert", "import", str(world), str(world / "imported"), "--vocab-size", "5"],
        ("is a Hugging Face folder", "leave out --vocab-size"),
    ),
]
