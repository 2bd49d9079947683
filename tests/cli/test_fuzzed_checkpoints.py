"""Whatever manifest, header or index somebody wrote, what reads it works or ends with one error, in little memory."""

import contextlib
import hashlib
import io
import json
import random
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite import cli
from tests.cli.bad_input.checkpoints import STEP, checkpoint_of
from tests.cli.bad_input.forged import FILE, dumped, signed
from tests.cli.bad_input.hf_folders import folder_of
from tests.cli.bad_input.spoil import spoiled, spoiled_json, values
from tests.support.tiny import tiny_tokenizer

LARGEST_BYTES = 50_000_000
# Beside any JSON value those that a reader computes with.
numbers = st.sampled_from([0, 1, 47, 48, 49, 1 << 31, 1 << 53, 1 << 61, 1 << 200, -1, 1.5, 1e300, True])
lists = st.lists(numbers, max_size=3)
anything = values | numbers | lists


@dataclass(frozen=True)
class Kind:
    """A file of the world, how it is spoilt, and the command that reads it."""

    file: str
    spoil: Callable[[bytes, st.DataObject], bytes]
    command: Callable[[Path], list[str]]


def manifest(content: bytes, data: st.DataObject) -> bytes:
    """One value otherwise, and the hash that belongs to it."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    held = spoiled_json(json.loads(content)["manifest"], data.draw(anything), rng)
    return signed(dumped(held)).encode()


def header(content: bytes, data: st.DataObject) -> bytes:
    """One value of the header otherwise, in a header of its length."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    length = int.from_bytes(content[:8], "little")
    text = dumped(spoiled_json(json.loads(content[8 : 8 + length]), data.draw(anything), rng)).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def generate(world: Path) -> list[str]:
    flags = ["--prompt", "a", "--tokens", "1", "--tokenizer", str(world / "tok")]
    return ["generate", str(world / "trained" / "checkpoints" / STEP), *flags]


def inspect(folder: str) -> Callable[[Path], list[str]]:
    return lambda world: ["convert", "inspect", str(world / folder)]


CHECKPOINT = f"trained/checkpoints/{STEP}"
KINDS = {
    "manifest": Kind(f"{CHECKPOINT}/manifest.json", manifest, inspect("trained")),
    "manifest, its bytes": Kind(f"{CHECKPOINT}/manifest.json", spoiled, inspect("trained")),
    "manifest, of what is loaded": Kind(f"{CHECKPOINT}/manifest.json", manifest, generate),
    "header": Kind(f"{CHECKPOINT}/{FILE}", header, generate),
    "file": Kind(f"{CHECKPOINT}/{FILE}", spoiled, generate),
    "Hugging Face, header": Kind("hf/model.safetensors", header, inspect("hf")),
    "Hugging Face, imported": Kind(
        "hf/model.safetensors",
        header,
        lambda world: ["convert", "import", str(world / "hf"), str(world / "imported")],
    ),
    "Hugging Face, index": Kind("sharded/model.safetensors.index.json", spoiled, inspect("sharded")),
    "Hugging Face, config": Kind("hf/config.json", spoiled, inspect("hf")),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = tmp_path_factory.mktemp("forged")
    (world / "tok").mkdir()
    tiny_tokenizer(world / "tok")
    checkpoint_of(world)
    hf = folder_of(world)
    shutil.copytree(hf, world / "sharded")
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (world / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    return world


def outside_of(folder: Path) -> dict[str, str]:
    """The hash of every file of the world."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=25, derandomize=True)
@given(data=st.data())
def test_a_forged_file_is_told(world: Path, kind: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        copy = Path(shutil.copytree(world, Path(name) / "world"))
        path = copy / KINDS[kind].file
        path.write_bytes(KINDS[kind].spoil(path.read_bytes(), data))
        before, told, out = outside_of(copy), io.StringIO(), io.StringIO()
        tracemalloc.start()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(out):
            code = cli.main(KINDS[kind].command(copy))
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        after = outside_of(copy)
    said = told.getvalue()
    assert (code, said.count("error: ")) in ((0, 0), (2, 1)) and "Traceback" not in said, said
    assert largest < LARGEST_BYTES
    assert {name: after.get(name) for name in before} == before
    assert all(name.startswith("imported/") for name in after.keys() - before.keys())
