"""Data sets of the Hugging Face Hub by name: their parquet files, which the Hub converts from any format.

The library `datasets` is not needed: the Hub has every public data set of up to 5 GB as CONFIG/SPLIT/0000.parquet and
so on under the revision refs/convert/parquet, which no code of the data set makes on this machine.
"""

from collections.abc import Sequence
from glob import escape
from pathlib import Path

from megalite.config.sections.hub_dataset import HUB_FORMS, HubDataset
from megalite.config.sources.hub import one_at_a_time
from megalite.errors import DataError, listed

_REVISION = "refs/convert/parquet"
_PARTIAL = "partial-"
_SHOWN = 8


def fetch_dataset(source: str, key: str) -> Path:
    """Fetch the parquet files of a split into the Hub's cache, and return their folder.

    Without a network, or with HF_HUB_OFFLINE, the files of the cache are taken. Raises DataError, with the setting
    `key`.
    """
    try:
        return _fetched(source)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _fetched(source: str) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    name = HubDataset.of(source)
    if name is None:
        raise DataError(f"{source} is no name of a data set on the Hub; {HUB_FORMS}")

    revision = name.revision or _REVISION

    def snapshot(patterns: Sequence[str], *, cached: bool) -> Path:
        folder = snapshot_download(
            name.repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=cached,
        )
        return Path(folder)

    with one_at_a_time(Path(constants.HF_HUB_CACHE), f"datasets--{name.repository}"):
        try:
            files = HfApi().list_repo_files(name.repository, repo_type="dataset", revision=revision)
            inner = _folder_of(name, files)
            folder = snapshot([f"{escape(inner)}/*.parquet"], cached=False)
            # When the Hub is lost meanwhile, its client returns the cache's folder as it is.
            if not all((folder / file).is_file() for file in files if file.startswith(f"{inner}/")):
                raise DataError(_not_fetched(name, "files are missing after the download"))
            return folder / inner
        except DataError:
            raise
        # The Hub's client raises the errors of several libraries.
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            try:
                folder = snapshot([], cached=True)
            except (OSError, ValueError):
                raise DataError(_not_fetched(name, reason)) from error
            return _of_cache(name, folder)


def _of_cache(name: HubDataset, folder: Path) -> Path:
    """Return the folder of the split in a snapshot of the cache. Raises DataError where files are missing."""
    files = [file.relative_to(folder).as_posix() for file in folder.rglob("*.parquet")]
    inner = _folder_of(name, files)
    numbers = sorted(int(file.stem) for file in (folder / inner).glob("*.parquet") if file.stem.isdecimal())
    if numbers != list(range(len(numbers))) or any((folder.parents[1] / "blobs").glob("*.incomplete")):
        raise DataError(
            _not_fetched(name, "the cache has a part of its files, and the Hub cannot be reached")
        )
    return folder / inner


def _folder_of(name: HubDataset, files: Sequence[str]) -> str:
    """Return CONFIG/SPLIT of a data set. Raises DataError, with the names that there are."""
    places = {
        tuple(file.split("/")[:2]) for file in files if file.endswith(".parquet") and file.count("/") == 2
    }
    configs = sorted({config for config, _ in places})
    config = name.config or (configs[0] if len(configs) == 1 else "default")
    splits = sorted(split for of_config, split in places if of_config == config)
    if name.split in splits:
        return f"{config}/{name.split}"
    if not configs:
        raise DataError(_not_fetched(name, "it has no parquet files"))
    if not splits:
        problem = "needs its configuration" if name.config is None else f"has no configuration {config}"
        example = f"{name.base}/{configs[0]}:{name.split}"
        raise DataError(f"{name} {problem}; there is {listed(configs, _SHOWN)}: write for example {example}")
    if f"{_PARTIAL}{name.split}" in splits:
        raise DataError(
            f"{name}: of so large a data set the Hub has only the first 5 GB as parquet; download its own files "
            f"(hf download {name.repository} --repo-type dataset --local-dir FOLDER) and name their folder, or take "
            f"the first part: {name.base}/{config}:{_PARTIAL}{name.split}"
        )
    raise DataError(f"{name} has no split {name.split}; there is {listed(splits, _SHOWN)}")


def _not_fetched(name: HubDataset, reason: str) -> str:
    return (
        f"{name} could not be fetched from the Hugging Face Hub as parquet ({reason.rstrip('.')}); on a machine with "
        f"network access run: hf download {name.repository} --repo-type dataset --local-dir FOLDER, and name that "
        "folder, or the files in it"
    )
