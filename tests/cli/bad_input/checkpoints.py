"""Damaged and unfit checkpoints: megalite convert, megalite generate, and a run that resumes."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.cli.bad_input.case import Case, train
from tests.support.tiny import tiny_shape

STEP = "step-000020"


@cache
def _pristine() -> tempfile.TemporaryDirectory[str]:
    """A run's folder with one checkpoint, and without a tokenizer; removed when the process ends."""
    from tests.unit.convert.exporting import lively_stage, save_stage

    folder = tempfile.TemporaryDirectory()
    shape = replace(tiny_shape(layers=2), vocab_size=384)
    save_stage(Path(folder.name), shape, lively_stage(shape))
    return folder


def checkpoint_of(world: Path) -> Path:
    """The run `trained` in the world with its one checkpoint, which is given."""
    shutil.copytree(Path(_pristine().name), world / "trained")
    return world / "trained" / "checkpoints" / STEP


def with_checkpoint(
    *command: str, spoil: Callable[[Path], object] | None = None, behind: tuple[str, ...] = ()
) -> Callable[[Path], list[str]]:
    """The command on a run's folder whose checkpoint was spoilt."""

    def make(world: Path) -> list[str]:
        checkpoint = checkpoint_of(world)
        if spoil is not None:
            spoil(checkpoint)
        return [*command, str(world / "trained"), *(each.replace("WORLD", str(world)) for each in behind)]

    return make


def inspecting(spoil: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    return with_checkpoint("convert", "inspect", spoil=spoil)


def generating(*flags: str, spoil: Callable[[Path], object] | None = None) -> Callable[[Path], list[str]]:
    flags = ("--prompt", "the tensor", "--tokens", "8", "--tokenizer", "WORLD/tok", *flags)
    return with_checkpoint("generate", spoil=spoil, behind=flags)


def manifest(**changes: Any) -> Callable[[Path], object]:
    def spoil(checkpoint: Path) -> None:
        [path] = checkpoint.glob("*.json")
        outer = json.loads(path.read_text())
        path.write_text(json.dumps({**outer, "manifest": outer["manifest"] | changes}))

    return spoil


def write_manifest(content: str) -> Callable[[Path], object]:
    return lambda checkpoint: [path.write_text(content) for path in checkpoint.glob("*.json")]


def remove(pattern: str) -> Callable[[Path], object]:
    return lambda checkpoint: [path.unlink() for path in checkpoint.glob(pattern)]


def truncate(checkpoint: Path) -> None:
    path = next(checkpoint.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(checkpoint: Path) -> None:
    path = next(checkpoint.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-50] ^= 0x10
    path.write_bytes(content)


def resume_another_shape(world: Path) -> list[str]:
    return train(world, checkpoint__resume=str(checkpoint_of(world)))


def name_a_missing_step(checkpoint: Path) -> None:
    (checkpoint.parent / "latest").write_text("step-000099\n")
    shutil.rmtree(checkpoint)


CASES = [
    Case("no checkpoint at all", lambda world: ["convert", "inspect", str(world / "tok")], ("tok",)),
    Case("a checkpoint that is not there", lambda world: ["convert", "inspect", str(world / "no")], ("no",)),
    Case("a latest checkpoint that is gone", inspecting(name_a_missing_step), ("trained",)),
    Case("a checkpoint without a manifest", inspecting(remove("*.json")), (STEP,)),
    Case("a manifest that is no JSON", inspecting(write_manifest("{")), (STEP,)),
    Case("a manifest that is a list", inspecting(write_manifest("[]")), (STEP,)),
    Case(
        "a manifest of another format",
        inspecting(manifest(format=99)),
        (STEP, "format 99", "the version that wrote it"),
    ),
    Case("a manifest without its tensors", inspecting(manifest(tensors=3)), (STEP, "use another")),
    Case("a checkpoint without a file of its own", inspecting(remove("*.safetensors")), (STEP, "missing")),
    Case("a checkpoint cut short", inspecting(truncate), (STEP,)),
    Case("a checkpoint with another bit", generating(spoil=flip_a_bit), (STEP,)),
    Case("a checkpoint of another model", resume_another_shape, (STEP,)),
    Case(
        "a run without a tokenizer", with_checkpoint("generate", behind=("--prompt", "a")), ("--tokenizer",)
    ),
    Case("a temperature below zero", generating("--temperature", "-1"), ("--temperature",)),
    Case("a nucleus of nothing", generating("--temperature", "1", "--top-p", "0"), ("--top-p",)),
    Case("more tokens than positions", generating("--tokens", "100000"), ("--tokens",)),
    Case("ranks that cannot split the heads", generating("--tensor", "3"), ("--tensor",)),
    Case(
        "an export over a file",
        with_checkpoint("convert", "export", behind=("WORLD/text.txt",)),
        ("text.txt",),
    ),
    Case(
        "a shard's size that is none",
        with_checkpoint("convert", "export", behind=("WORLD/made", "--shard-size", "much")),
        ("--shard-size", "500MB"),
    ),
    Case(
        "a moving average that was not kept",
        with_checkpoint("convert", "export", behind=("WORLD/made", "--weights", "ema")),
        (STEP, "ema"),
    ),
]
