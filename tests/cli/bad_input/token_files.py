"""Damaged token files, and those that do not belong to a run: megalite data inspect and megalite train."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megalite.data.files.token_file import TokenWriter, bin_path, idx_path
from tests.cli.bad_input.case import Case, train
from tests.support.tiny import tiny_tokenizer

PREPARE_AGAIN = "prepare or copy both files again"
# Bytes of the index before the lengths, and the sequences that the good one has.
HEADER, SEQUENCES = 34, 40


def inspect(spoil: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    def make(world: Path) -> list[str]:
        spoil(world)
        return ["data", "inspect", str(world / "good")]

    return make


def patched(at: int, content: bytes) -> Callable[[Path], object]:
    """Some bytes of the index replaced; `at` below 0 counts from its end."""

    def spoil(world: Path) -> None:
        path = world / "good.idx"
        data = bytearray(path.read_bytes())
        at_ = at % len(data)
        data[at_ : at_ + len(content)] = content
        path.write_bytes(data)

    return spoil


def cut(name: str, size: int) -> Callable[[Path], object]:
    def spoil(world: Path) -> None:
        (world / name).write_bytes((world / name).read_bytes()[:size])

    return spoil


def training_on(spoil: Callable[[Path], object], **changes: object) -> Callable[[Path], list[str]]:
    def make(world: Path) -> list[str]:
        spoil(world)
        return train(world, **changes)

    return make


def nothing(world: Path) -> None:
    """Return valid files; the mistake is in the settings."""


def of_another_tokenizer(world: Path) -> None:
    (world / "other").mkdir()
    tiny_tokenizer(world / "other", vocab_size=300)


def without_manifest(world: Path) -> None:
    (world / "good.json").unlink()


def facts(**changes: object) -> Callable[[Path], object]:
    """The manifest with other values."""

    def spoil(world: Path) -> None:
        path = world / "good.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def short_pair(world: Path, tokens: list[int]) -> str:
    """A pair of one document that says nothing of its tokenizer."""
    prefix = world / "short"
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        if tokens:
            writer.add(np.array(tokens, dtype=np.uint16))
            writer.end_document()
        writer.finish()
        writer.close()
    return str(prefix)


def training_on_pair(tokens: list[int]) -> Callable[[Path], list[str]]:
    return lambda world: train(world, data__source=short_pair(world, tokens))


def blend(*parts: tuple[str, float]) -> Callable[[Path], list[str]]:
    def make(world: Path) -> list[str]:
        sets = [{"source": str(world / name), "weight": weight} for name, weight in parts]
        return train(world, data__source=None, data__blend=sets)

    return make


def validating_on(name: str) -> Callable[[Path], list[str]]:
    return lambda world: train(
        world, data__source=str(world / "text.txt"), data__validation=str(world / name)
    )


CASES = [
    Case(
        "no such pair",
        lambda world: ["data", "inspect", str(world / "no")],
        ("no.idx does not exist", "megalite data prepare"),
    ),
    Case(
        "a folder in place of a pair",
        lambda world: ["data", "inspect", str(world / "tok")],
        ("tok.idx does not exist", "prepare"),
    ),
    Case(
        "no .bin",
        inspect(lambda world: (world / "good.bin").unlink()),
        ("good.bin does not exist", "prepare"),
    ),
    Case(
        "no .idx",
        inspect(lambda world: (world / "good.idx").unlink()),
        ("good.idx does not exist", "prepare"),
    ),
    Case("half a .bin", inspect(cut("good.bin", 50)), ("good.bin has 50 bytes where", PREPARE_AGAIN)),
    Case("an empty .bin", inspect(cut("good.bin", 0)), ("good.bin has 0 bytes where", PREPARE_AGAIN)),
    Case(
        "an .idx cut in its rows",
        inspect(cut("good.idx", 100)),
        ("good.idx has 100 bytes where", PREPARE_AGAIN),
    ),
    Case(
        "an .idx cut in its header",
        inspect(cut("good.idx", 20)),
        ("good.idx is not a Megatron index", "name the prefix"),
    ),
    Case(
        "an empty .idx", inspect(cut("good.idx", 0)), ("good.idx is not a Megatron index", "name the prefix")
    ),
    Case(
        "another magic",
        inspect(patched(0, b"TNTIDX")),
        ("good.idx is not a Megatron index", "name the prefix"),
    ),
    Case(
        "another version", inspect(patched(9, struct.pack("<Q", 2))), ("good.idx has version 2", "version 1")
    ),
    Case(
        "numbers with a point",
        inspect(patched(17, b"\x07")),
        ("good.idx has dtype code 7, which holds no token ids", "known are"),
    ),
    Case("another type", inspect(patched(17, b"\x04")), ("good.bin has", PREPARE_AGAIN)),
    Case(
        "more sequences than can be",
        inspect(patched(18, struct.pack("<Q", 2**61))),
        ("good.idx has", PREPARE_AGAIN),
    ),
    Case("no documents at all", inspect(patched(26, struct.pack("<Q", 0))), ("good.idx has", PREPARE_AGAIN)),
    Case(
        "a sequence length below nothing",
        inspect(patched(HEADER, struct.pack("<i", -1))),
        ("good.idx: sequences do not lie", PREPARE_AGAIN),
    ),
    Case(
        "a wrong offset",
        inspect(patched(HEADER + 4 * SEQUENCES + 8, struct.pack("<q", 1))),
        ("good.idx: sequences do not lie", PREPARE_AGAIN),
    ),
    Case(
        "a wrong last offset",
        inspect(patched(HEADER + 12 * SEQUENCES - 8, struct.pack("<q", -8))),
        ("good.bin has", PREPARE_AGAIN),
    ),
    Case(
        "documents that go back",
        inspect(patched(-16, struct.pack("<q", -5))),
        ("good.idx: documents do not cover", PREPARE_AGAIN),
    ),
    Case(
        "a document that does not begin",
        inspect(patched(HEADER + 12 * SEQUENCES, struct.pack("<q", 3))),
        ("good.idx: documents do not cover", PREPARE_AGAIN),
    ),
    Case(
        "a run without its .idx",
        training_on(lambda world: (world / "good.idx").unlink()),
        ("good", "does not exist", "name a text file"),
    ),
    Case(
        "a run on half a .bin",
        training_on(cut("good.bin", 50)),
        ("good.bin has 50 bytes where", PREPARE_AGAIN),
    ),
    Case(
        "another tokenizer",
        lambda world: (of_another_tokenizer(world), train(world, tokenizer__path=str(world / "other")))[1],
        ("good was prepared with", "tokenizer.path"),
    ),
    Case(
        "a pair that names no tokenizer",
        training_on(without_manifest, tokenizer__path=None),
        ('model.vocab_size: "auto" takes', "good.bin has none; set it to", "or set tokenizer.path"),
    ),
    Case(
        "a pair whose tokenizer is gone",
        training_on(facts(tokenizer="/nowhere/tokenizer.json", tokenizer_beside=""), tokenizer__path=None),
        ("good was made with /nowhere/tokenizer.json, which does not exist any more", "set tokenizer.path"),
    ),
    Case(
        "a pair whose tokenizer has no such end",
        training_on(facts(end_of_document="</s>"), tokenizer__path=None),
        ("tokenizer.json has no token '</s>'", "tokenizer.end_of_document"),
    ),
    Case(
        "ids beyond the vocabulary",
        training_on_pair([1, 2, 9999, 4] * 40),
        ("short.bin: its largest id, 9999, is outside", "prepare the text"),
        in_a_process=True,
    ),
    Case(
        "a model smaller than the tokenizer",
        training_on(nothing, model__vocab_size=100),
        ("model.vocab_size: 100 is less than the", 'or more, or "auto"'),
    ),
    Case(
        "a pair of no documents",
        training_on_pair([]),
        ("short has 0 tokens, fewer", "name a longer text"),
        in_a_process=True,
    ),
    Case(
        "a pair of one token",
        training_on_pair([7]),
        ("short has 1 token, fewer", "name a longer text"),
        in_a_process=True,
    ),
    Case(
        "a pair to be divided",
        training_on(nothing, data__split=[0.9, 0.1]),
        ("good is a prepared token file", "data.split", "data.validation"),
    ),
    Case(
        "a pair of shorter documents",
        training_on(nothing, data__min_length=5),
        ("good was prepared with min_length 0", "data.min_length = 5", "prepare the text again"),
    ),
    Case(
        "a pair among texts",
        lambda world: train(world, data__source=[str(world / "good"), str(world / "text.txt")]),
        ("good is a prepared token file", "name it as the only source"),
    ),
    Case(
        "a weight of nothing",
        blend(("good", 0.0)),
        ("data.blend[1].weight", "0 is not greater than 0", "delete this table"),
    ),
    Case(
        "a weight below nothing",
        blend(("good", 1.0), ("text.txt", -0.5)),
        ("data.blend[2].weight", "-0.5 is not greater than 0", "delete this table"),
    ),
    Case("a weight without end", blend(("good", float("inf"))), ("data.blend[1].weight", "finite")),
    Case(
        "a set without its weight",
        lambda world: train(world, data__source=None, data__blend=[{"source": str(world / "good")}]),
        ("data.blend[1].weight", "required"),
    ),
    Case(
        "a set named twice",
        blend(("good", 1.0), ("good", 2.0)),
        ("data.blend[2].source", "also the source of data.blend[1]", "name it once"),
    ),
    Case(
        "a set that is not there",
        blend(("good", 1.0), ("no.txt", 2.0)),
        ('no.txt" does not exist', "name a text file"),
    ),
    Case(
        "a text twice",
        lambda world: train(world, data__blend=[{"source": "x", "weight": 1.0}]),
        ("data.source", "data.blend", "delete the blend"),
    ),
    Case(
        "shares that do not add up, of a run",
        training_on(nothing, data__split=[0.5, 0.2]),
        ("data.split", "adds up to 0.7, not 1", "write for example"),
    ),
    Case(
        "validation on what is trained on",
        validating_on("text.txt"),
        ("data.validation", "is also the training text", "data.split"),
    ),
    Case(
        "validation that is not there",
        validating_on("no.txt"),
        ('no.txt" does not exist', "name a text file"),
    ),
]
