"""The pages ARCHITECTURE.md and docs/extending.md name what exists; texts are plain and name no folder of a machine."""

import re
import subprocess
from pathlib import Path

import pytest

from docs.rooms import rooms
from tests.test_architecture import INVERTED, PACKAGE, ROOT, ROWS, WINGS, compiled_sources, modules


def inverted_comments(source: str) -> list[str]:
    """Return the beginnings of inverted sentences in the comments of C++; lines of one comment are joined."""
    lines = (re.search(r"//(.*)", line) for line in source.splitlines())
    blocks, block = [], ""
    for found in lines:
        alone = found is not None and not found.string[: found.start()].strip()
        if block and not alone:
            blocks.append(block)
            block = ""
        if found is not None and not alone:
            blocks.append(found[1])
        elif found is not None:
            block += found[1]
    return [found[1] for text in (*blocks, block) for found in INVERTED.finditer(" ".join(text.split()))]


def test_comments_of_compiled_operators_are_plain_sentences() -> None:
    assert inverted_comments("// Copies a tile. What\n// arrives late is zero.\nint a;  // Of a row.") == [
        "What arrives",
        "Of a",
    ]
    assert not inverted_comments("// What;\nint a;  // kept\n// of a row\n// Copies a tile.")
    sources = compiled_sources()
    assert sources
    assert not {file.name: found for file in sources if (found := inverted_comments(file.read_text()))}


def missing_paths(page: str) -> list[str]:
    """Return the paths that a page names and that are neither in the package nor in the repository."""
    paths = set(re.findall(r"`([\w./]+/[\w.]*\w)`", page))
    assert len(paths) > 60
    return sorted(path for path in paths if not any((base / path).exists() for base in (PACKAGE, ROOT)))


def test_the_page_on_extending_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    written = {"families/NAME.py", "train/optimizer/NAME.py"}
    assert missing_paths(page) == sorted(written)


def test_the_page_names_files_that_exist_and_rows_that_hold() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    house, rows = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    assert missing_paths(page) == []
    packages = {module.package for module in modules()} - {"__init__", "__main__"}
    wings = {
        f"{wing}/" for package in WINGS for wing in WINGS[package] if (PACKAGE / package / wing).is_dir()
    }
    assert wings and packages | wings <= set(re.findall(r"\w+/?", house)) | set(re.findall(r"\w+", house))
    row_of = {
        name: len(rows.split("|")) - row
        for row, names in enumerate(rows.split("|"))
        for name in names.split()
    }
    ordered = sorted(ROWS.keys() - {"__init__", "__main__"}, key=lambda name: (ROWS[name], name))
    assert ordered == sorted(row_of, key=lambda name: (row_of[name], name))


def test_every_file_is_listed_with_its_first_sentence() -> None:
    lines = [line.strip() for line in rooms() if line.strip()]
    assert len(lines) == len(modules())
    # One name, and behind it what the file holds.
    assert not [line for line in lines if not re.match(r"\S+/?  *\S+ \S+", line)]
    assert any("Chat templates" in line for line in rooms("data/chat"))


def test_no_tracked_file_names_a_folder_of_this_machine() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    # A checkout or a home may lie directly in a folder that every system has, such as /opt.
    folders = [
        f"{folder}/" for folder in (ROOT, ROOT.parent, Path.home()) if str(folder.parent) not in ("/", "/usr")
    ]
    pattern = re.compile(
        "|".join([*map(re.escape, folders), r"/(home|Users)/\w+/", r"(?<![\w\]}./-])/(root|work|workspace)/"])
    )
    found = []
    for name in filter(None, listing.stdout.decode().split("\0")):
        file = ROOT / name
        if not file.is_file() or file == Path(__file__):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {match.group()}" for match in pattern.finditer(text)]
    assert not found
