"""Checkpoints and weight files that somebody made to do harm: what they say of themselves is consistent and wrong."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.bad_input.case import Case
from tests.cli.bad_input.checkpoints import STEP, generating, inspecting
from tests.cli.bad_input.hf_folders import NORM, importing

FILE = "rank-00000.safetensors"
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [1.0]}
HUGE = 1 << 60


def dumped(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def signed(content: str) -> str:
    """A manifest's text with the hash that belongs to it: the hash tells damage, not who wrote it."""
    return f'{{"manifest":{content},"sha256":"{hashlib.sha256(content.encode()).hexdigest()}"}}\n'


def content_of(checkpoint: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["manifest"]
    return content


def forged(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The manifest after `change`, with its hash."""

    def spoil(checkpoint: Path) -> None:
        content = content_of(checkpoint)
        change(content)
        (checkpoint / "manifest.json").write_text(signed(dumped(content)))

    return spoil


def in_text(old: str, new: str) -> Callable[[Path], None]:
    """The manifest's text with one thing written otherwise, with its hash."""

    def spoil(checkpoint: Path) -> None:
        text = dumped(content_of(checkpoint))
        assert old in text
        (checkpoint / "manifest.json").write_text(signed(text.replace(old, new, 1)))

    return spoil


def entry_of(content: dict[str, Any], name: str = NORM) -> dict[str, Any]:
    entry: dict[str, Any] = content["tensors"]["weight"][name]
    return entry


def from_file(name: str) -> Callable[[Path], None]:
    """Every shard in another file, which is there and right; WORLD: the folder above the run's."""

    def spoil(checkpoint: Path) -> None:
        world = checkpoint.parents[2]
        shutil.copy(checkpoint / FILE, world / "outside.safetensors")
        path = name.replace("WORLD", str(world))

        def change(content: dict[str, Any]) -> None:
            content["files"] = {path: content["files"].pop(FILE)}
            for entry in content["tensors"]["weight"].values():
                for shard in entry["shards"]:
                    shard["file"] = path

        forged(change)(checkpoint)

    return spoil


def linked(checkpoint: Path) -> None:
    outside = checkpoint.parents[2] / "outside.safetensors"
    shutil.move(checkpoint / FILE, outside)
    (checkpoint / FILE).symlink_to(outside)


def linked_manifest(checkpoint: Path) -> None:
    outside = checkpoint.parents[2] / "outside.json"
    shutil.move(checkpoint / "manifest.json", outside)
    (checkpoint / "manifest.json").symlink_to(outside)


def pipe(checkpoint: Path) -> None:
    (checkpoint / FILE).unlink()
    os.mkfifo(checkpoint / FILE)


def huge_model(content: dict[str, Any]) -> None:
    """A model whose every tensor is there, as the manifest has it."""
    content["model"]["hidden_size"] = HUGE
    for entry in content["tensors"]["weight"].values():
        for lengths in (entry, *entry["shards"]):
            lengths["shape"] = [HUGE if length == 48 else length for length in lengths["shape"]]


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def pickled(path: Path, size_bytes: int = 0) -> None:
    content = pickle.dumps(Bomb(path.parent / "harm"))
    path.write_bytes(content + bytes(max(0, size_bytes - len(content))))


def pickled_shard(checkpoint: Path) -> None:
    pickled(checkpoint / FILE, (checkpoint / FILE).stat().st_size)


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A safetensors file with its header after `change`, as long as it was where that is possible."""

    def spoil(path: Path) -> None:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = dumped(header).encode().ljust(length)
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return spoil


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The same of a checkpoint's, whose manifest is told the new size."""

    def spoil(checkpoint: Path) -> None:
        with_header(change)(checkpoint / FILE)
        size = (checkpoint / FILE).stat().st_size
        forged(lambda content: content["files"].update({FILE: size}))(checkpoint)

    return spoil


def weights(change: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    """The import of a Hugging Face folder after `change` to its file."""
    return importing(lambda folder: change(folder / "model.safetensors"))


def overlapping(held: dict[str, Any]) -> None:
    first, second, *_ = (each for name, each in sorted(held.items()) if name != "__metadata__")
    second["data_offsets"] = first["data_offsets"]
    second["shape"] = first["shape"]


def twice(path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].decode().rstrip()
    entry = json.dumps(json.loads(text)[NORM])
    text = f'{text[:-1]},"{NORM}":{entry}}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[8 + length :])


def index_by_number(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: 7}}))


CASES = [
    Case("a file above the folder", generating(spoil=from_file("../../../outside.safetensors")), (STEP, "files ../")),
    Case("a file anywhere", generating(spoil=from_file("WORLD/outside.safetensors")), (STEP, "files /")),
    Case("a file that is not in the list", inspecting(forged(lambda m: m.update(files={}))), (STEP, "file: 'rank")),
    Case("a link out of the folder", generating(spoil=linked), (FILE, "link out of its folder")),
    Case("a manifest that is a link", inspecting(linked_manifest), ("manifest.json", "link out of its folder")),
    Case("a pipe in a file's place", generating(spoil=pipe), (FILE, "is not a file")),
    Case("a pickle in a file's place", generating(spoil=pickled_shard), (FILE, "it is a pickle")),
    Case("a key twice", inspecting(in_text('"step":20', '"step":20,"step":21')), (STEP, "'step' twice")),
    Case("a manifest with no number", inspecting(in_text('"step":20', '"step":NaN')), (STEP, "NaN is no number")),
    Case("a manifest with a number too large", inspecting(in_text("0.001", "1e999")), (STEP, "1e999 is no number")),
    Case("a manifest that is deep", inspecting(in_text("0.001", "[" * 200_000 + "]" * 200_000)), (STEP, "too deeply")),
    Case("a step that is a word", inspecting(in_text('"step":20', '"step":"x"')), (STEP, "trainer_state step: 'x'")),
    Case("an offset below 0", inspecting(forged(lambda m: entry_of(m)["shards"][0].update(offsets=[-1]))), (STEP,)),
    Case("half a shape", inspecting(forged(lambda m: entry_of(m).update(shape=[]))), (STEP, NORM)),
    Case("a type that there is not", inspecting(forged(lambda m: entry_of(m).update(dtype="object"))), (STEP, "dtype")),
    Case("a model that is huge", generating(spoil=forged(huge_model)), (STEP, "bytes, but the file")),
    Case(
        "layers without end",
        generating(spoil=forged(lambda m: m["model"].update(num_hidden_layers=HUGE))),
        (STEP, f"{HUGE} layers"),
    ),
    Case(
        "positions without end",
        generating(spoil=forged(lambda m: m["model"].update(max_position_embeddings=HUGE))),
        (STEP, "max_position_embeddings"),
    ),
    Case(
        "rotary divisors for other heads",
        generating(spoil=forged(lambda m: m["model"].update(rope_scaling=LONGROPE))),
        (STEP, "short_factor"),
    ),
    Case("a family that there is not", inspecting(forged(lambda m: m["model"].update(family="x"))), (STEP, "family")),
    Case("a tokenizer that is a list", generating(spoil=forged(lambda m: m["config"].update(tokenizer=[1]))), (STEP,)),
    Case("a header as long as the world", generating(spoil=lambda c: (c / FILE).write_bytes(b"\xff" * 8)), (FILE,)),
    Case("a header of overlapping tensors", generating(spoil=header(overlapping)), (FILE, "begins at byte")),
    Case("a tensor of another key", generating(spoil=header(lambda held: held.pop(f"weight/{NORM}"))), (FILE,)),
    Case("weights that are a pickle", weights(pickled), ("model.safetensors", "it is a pickle", "fetch it again")),
    Case("weights twice in a header", weights(twice), ("model.safetensors", f"'{NORM}' twice")),
    Case("weights that overlap", weights(with_header(overlapping)), ("model.safetensors", "begins at byte")),
    Case(
        "weights of a huge shape",
        weights(with_header(lambda held: held[NORM].update(shape=[HUGE, HUGE]))),
        ("model.safetensors", NORM),
    ),
    Case("an index of numbers", importing(index_by_number), ("model.safetensors.index.json", "not an index")),
]  # fmt: skip
