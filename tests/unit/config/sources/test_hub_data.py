"""Data sets by their name on the Hugging Face Hub, with a Hub of files in its place, and without a network."""

import fnmatch
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi, constants

from megalite.config.load import load_run
from megalite.config.sections.hub_dataset import HubDataset
from megalite.data.text.corpus import Corpus
from megalite.errors import ConfigError, DataError
from tests.unit.config.runs import changed, write_run

COMMIT = "0123456789abcdef" * 2 + "01234567"
FILES = {
    "small/train/0000.parquet": ["one", "two"],
    "small/train/0001.parquet": ["three"],
    "small/test/0000.parquet": ["four"],
    "large/partial-train/0000.parquet": ["five"],
}


def publish(folder: Path, files: dict[str, list[str]]) -> Path:
    """Write parquet files as the Hub's refs/convert/parquet has them."""
    for name, texts in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": texts}), folder / name)
    return folder


def texts(source: str) -> list[str]:
    return [piece.text for piece, _ in Corpus.open([source], key="data.source").pieces()]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real cache of the Hub with the whole data set, and no network."""
    dataset = tmp_path / "hub" / "datasets--org--name"
    publish(dataset / "snapshots" / COMMIT, FILES)
    (dataset / "blobs").mkdir()
    (dataset / "refs" / "refs" / "convert").mkdir(parents=True)
    (dataset / "refs" / "refs" / "convert" / "parquet").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert constants.HF_HUB_OFFLINE
    return dataset


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Hub's client with the files of a folder in the Hub's place; the patterns that it was asked for."""
    published, cache, asked = publish(tmp_path / "published", FILES), tmp_path / "cache", []

    def names(_: HfApi, repository: str, *, repo_type: str, revision: str) -> list[str]:
        assert (repository, repo_type, revision) == ("org/name", "dataset", "refs/convert/parquet")
        return [*FILES, ".gitattributes"]

    def snapshot(repository: str, *, allow_patterns: Sequence[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        for name in FILES:
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (cache / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(published / name, cache / name)
        return str(cache)

    monkeypatch.setattr(HfApi, "list_repo_files", names)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return asked


@pytest.mark.parametrize(
    ("source", "dataset"),
    [
        ("hf:org/name", HubDataset("org/name", None, "train")),
        ("hf:org/na.me_2/wiki-103", HubDataset("org/na.me_2", "wiki-103", "train")),
        ("hf:org/name:test", HubDataset("org/name", None, "test")),
        ("hf:org/name/v1.0:validation", HubDataset("org/name", "v1.0", "validation")),
    ],
)
def test_names(source: str, dataset: HubDataset) -> None:
    assert HubDataset.of(source) == dataset


@pytest.mark.parametrize(
    "source", ["hf:name", "hf:", "hf:a/b/c/d", "hf:a/b:c:d", "hf:../b", "hf:a/b:", "hf:a/b:t[:9]"]
)
def test_another_name_is_an_error_before_the_run(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_run(write_run(tmp_path, changed({"data.source": source})), places=True)
    [problem] = refused.value.problems
    assert problem.key == "data.source" and "hf:ORG/NAME/CONFIG:SPLIT" in problem.remedy


def test_a_split_is_fetched_alone(hub: list[str]) -> None:
    assert texts("hf:org/name/small") == ["one", "two", "three"]
    assert hub == ["small/train/*.parquet"]
    assert texts("hf:org/name/small:test") == ["four"]


def test_a_download_that_lacks_a_file_is_refused(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "list_repo_files", lambda *_, **__: [*FILES, "small/train/0002.parquet"])
    with pytest.raises(DataError, match=r"data\.source: hf:org/name/small:train .*files are missing after"):
        texts("hf:org/name/small")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "hf:org/name",
            "needs its configuration; there is large, small: write for example hf:org/name/large:train",
        ),
        ("hf:org/name/tiny", "has no configuration tiny; there is large, small"),
        ("hf:org/name/small:dev", "has no split dev; there is test, train"),
        (
            "hf:org/name/large",
            r"only the first 5 GB .* or take the first part: hf:org/name/large:partial-train",
        ),
    ],
)
def test_a_name_of_no_split_lists_those_of_the_data_set(hub: list[str], source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        texts(source)
    assert not hub


def test_the_cache_is_enough_without_a_network(cached: Path) -> None:
    assert texts("hf:org/name/small") == ["one", "two", "three"]
    assert texts("hf:org/name/large:partial-train") == ["five"]


def test_a_commit_keeps_the_text_when_the_data_set_changes(cached: Path) -> None:
    newer = publish(cached / "snapshots" / ("f" * 40), {"small/train/0000.parquet": ["new"]})
    (cached / "refs" / "refs" / "convert" / "parquet").write_text(newer.name)
    assert texts("hf:org/name/small") == ["new"]
    source = f"hf:org/name@{COMMIT}/small:test"
    assert texts(source) == ["four"] and str(HubDataset.of(source)) == source
    with pytest.raises(DataError, match="hf:org/name@abc:train could not be fetched"):
        texts("hf:org/name@abc")


def test_a_cache_in_part_is_refused_without_a_network(cached: Path) -> None:
    (cached / "blobs" / "abc.incomplete").touch()
    with pytest.raises(DataError, match="the cache has a part of its files"):
        texts("hf:org/name/small")
    (cached / "blobs" / "abc.incomplete").unlink()
    (cached / "snapshots" / COMMIT / "small/train/0000.parquet").unlink()
    with pytest.raises(DataError, match="the cache has a part of its files"):
        texts("hf:org/name/small")


def test_a_data_set_that_nobody_fetched_names_the_download(cached: Path) -> None:
    remedy = "run: hf download org/other --repo-type dataset --local-dir FOLDER"
    with pytest.raises(DataError, match=f"hf:org/other:train could not be fetched .*offline.*{remedy}"):
        texts("hf:org/other")
