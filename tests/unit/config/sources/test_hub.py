"""Models by their name on the Hugging Face Hub, with a Hub of files in its place, and without a network."""

import fnmatch
import json
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, errors

from megalite.cli import convert
from megalite.config.load import load_run
from megalite.config.sources.hub import HubName
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.huggingface.files import local_folder
from megalite.data.tokenizers.tokenizer import load_tokenizer, save_tokenizer
from megalite.errors import CheckpointError, ConfigError
from tests.support.tiny import END_OF_DOCUMENT, tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

COMMIT = "0123456789abcdef" * 2 + "01234567"
# Files of published folders that are not read.
UNREAD = ("pytorch_model.bin", "modeling_llama.py", "consolidated.safetensors", "onnx/config.json", "run.pkl")


@dataclass
class Hub:
    """In place of huggingface_hub.snapshot_download: files of a folder into a cache of its form."""

    files: Path
    cache: Path
    asked: list[dict[str, Any]] = field(default_factory=list)
    fails_with: Exception | None = None

    def snapshot(
        self,
        repository: str,
        *,
        revision: str | None,
        allow_patterns: Sequence[str],
        local_files_only: bool = False,
    ) -> str:
        folder = self.cache / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT
        if local_files_only:
            if not folder.is_dir():
                raise errors.LocalEntryNotFoundError("not in the cache")
            return str(folder)
        self.asked.append({"repository": repository, "revision": revision})
        if self.fails_with is not None:
            raise self.fails_with
        time.sleep(0.05)
        for file in filter(Path.is_file, self.files.rglob("*")):
            name = file.relative_to(self.files).as_posix()
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / name)
        return str(folder)

    @property
    def fetched(self) -> set[str]:
        held = self.cache.rglob("snapshots/*/**/*")
        return {each.relative_to(self.cache).as_posix().split("/", 3)[3] for each in held if each.is_file()}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as people publish them: an export in several files, and other things."""
    folder = tmp_path_factory.mktemp("published")
    shape = replace(tiny_shape(layers=1), vocab_size=384)
    save_stage(folder, shape, lively_stage(shape))
    command = ["export", str(folder), str(folder / "files"), "--shard-size", "40KB"]
    assert convert.run(command) == 0
    tokenizer = load_tokenizer(tiny_tokenizer(folder), end_of_document=END_OF_DOCUMENT)
    save_tokenizer(tokenizer.backend, folder / "files", END_OF_DOCUMENT)
    for name in UNREAD:
        (folder / "files" / name).parent.mkdir(exist_ok=True)
        (folder / "files" / name).write_bytes(b"not to be read")
    return folder / "files"


@pytest.fixture
def hub(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    shutil.copytree(published, tmp_path / "published")
    hub = Hub(tmp_path / "published", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return hub


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("org/name", "org/name", None),
        ("Org-1/na.me_2@v1.0", "Org-1/na.me_2", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
    ],
)
def test_names(text: str, repository: str, revision: str | None) -> None:
    assert HubName.of(text) == HubName(repository, revision)
    assert str(HubName.of(text)) == text


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "/a/b", "./a", "../a", "~a/b", "a/b@", "a b/c", "a/b@c@d", ""]
)
def test_what_is_no_name(text: str) -> None:
    assert HubName.of(text) is None


def test_weights_are_fetched_once_and_nothing_else(hub: Hub, published: Path) -> None:
    folder = local_folder("org/name@v2")
    files = {path.name for path in published.glob("*.safetensors")} - set(UNREAD)
    described = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    described |= {"tokenizer.json", "tokenizer_config.json"}
    assert len(files) > 2 and hub.fetched == files | described
    # First what says which files there are; then these, of the very commit that said so.
    assert [each["revision"] for each in hub.asked] == ["v2", COMMIT]
    assert local_folder("org/name@v2") == folder and len(hub.asked) == 2


def test_an_import_by_name_is_that_of_the_folder(hub: Hub, published: Path, tmp_path: Path) -> None:
    for source, run in (("org/name", "by-name"), (str(published), "by-folder")):
        assert convert.run(["import", source, str(tmp_path / run)]) == 0
        assert convert.run(["export", str(tmp_path / run), str(tmp_path / f"{run}-out")]) == 0
    written = [tmp_path / f"{run}-out" / "model.safetensors" for run in ("by-name", "by-folder")]
    assert written[0].read_bytes() == written[1].read_bytes()
    assert (tmp_path / "by-name" / "tokenizer" / "tokenizer.json").is_file()


def read(weights: str) -> Any:
    settings = {"model.weights": weights, "training.steps": 1, "training.sequence_length": 8}
    settings |= {"training.global_batch_size": 1, "training.micro_batch_size": 1, "data.source": "text.txt"}
    return load_run(None, [f"--{key}={value}" for key, value in settings.items()]).config


def test_a_run_reads_the_shape_alone_and_keeps_the_commit(hub: Hub) -> None:
    config = read("org/name")
    assert config.model.shape(0).hidden_size == tiny_shape().hidden_size
    assert config.model.weights == f"org/name@{COMMIT}"
    assert Path(config.tokenizer.path).parent == hub.cache / "models--org--name" / "snapshots"
    assert not any(name.endswith(".safetensors") for name in hub.fetched)
    assert read(config.model.weights).model == config.model and len(hub.asked) == 1


def test_a_folder_here_comes_first(hub: Hub, published: Path, tmp_path: Path) -> None:
    shutil.copytree(published, tmp_path / "org" / "name")
    assert local_folder("org/name") == Path("org/name")
    assert read("org/name").model.weights == "org/name"
    assert not hub.asked


def test_what_is_not_built_is_said_before_any_weight_is_fetched(hub: Hub, tmp_path: Path) -> None:
    content = json.loads((hub.files / "config.json").read_text())
    (hub.files / "config.json").write_text(json.dumps(content | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match='hidden_act = "gelu"'):
        convert.run(["import", "org/name", str(tmp_path / "run")])
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


def test_ranks_that_start_together_fetch_once(hub: Hub) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(local_folder("org/name"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert len(hub.asked) == 2


def test_only_safetensors_are_named_by_an_index(hub: Hub) -> None:
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (hub.files / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names pytorch_model\.bin, which is not a safetensors file"):
        local_folder("org/name")
    assert "pytorch_model.bin" not in hub.fetched


def test_a_folder_of_pickles_alone_is_refused(hub: Hub) -> None:
    for file in hub.files.glob("model*"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"\(it lacks model\.safetensors\); .* with transformers' save_pretr"
    ):
        local_folder("org/name")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.OfflineModeIsEnabled("offline"), "(offline)"),
        (ConnectionError("Name or service not known\nand more"), "(Name or service not known)"),
        (ValueError(""), "(ValueError)"),
    ],
)
def test_what_cannot_be_fetched_says_how_to_get_it_by_hand(hub: Hub, error: Exception, said: str) -> None:
    hub.fails_with = error
    remedy = "hf download org/name --revision v2 --include '*.json' '*.safetensors'"
    with pytest.raises(CheckpointError) as refused:
        local_folder("org/name@v2")
    assert said in str(refused.value) and remedy in str(refused.value)
    with pytest.raises(ConfigError) as wrong:
        read("org/name@v2")
    assert said in str(wrong.value) and remedy in str(wrong.value)
    assert [problem.key for problem in wrong.value.problems] == ["model.weights"]


@pytest.fixture
def offline(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real cache of the Hub, as another machine may have filled it; and no network."""
    model = tmp_path / "hub" / "models--org--name"
    shutil.copytree(published, model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert constants.HF_HUB_OFFLINE
    return model / "snapshots" / COMMIT


@pytest.mark.parametrize("name", ["org/name", f"org/name@{COMMIT}"])
def test_the_cache_is_enough_without_a_network(offline: Path, name: str) -> None:
    assert local_folder(name) == offline
    assert shape_of_folder(name).hidden_size == tiny_shape().hidden_size
    assert read(name).model.weights == f"org/name@{COMMIT}"


@pytest.mark.parametrize("missing", ["config.json", "model-00002-of-*"])
def test_a_cache_in_part_is_refused_without_a_network(offline: Path, missing: str) -> None:
    next(offline.glob(missing)).unlink()
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set and the cache is incomplete"):
        local_folder("org/name")


@pytest.mark.parametrize("name", ["org/other", "org/na..me", "org/name@v9", f"org/{'n' * 96}@{'r' * 100}"])
def test_a_name_nobody_fetched_is_refused_without_a_network(offline: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f'"{name}" is not a folder here, and fetching it'):
        shape_of_folder(name)
