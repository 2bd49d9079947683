"""Find the weight files of a Hugging Face folder and read their headers. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.checkpoint.strict_json import parse
from megalite.checkpoint.tensor_header import HeaderEntry, read_header
from megalite.config.sources.hub import DESCRIPTION, INDEX, HubName, fetch, fetch_description
from megalite.errors import CheckpointError

SINGLE = "model.safetensors"


def is_folder_of_weights(folder: Path) -> bool:
    """Whether this looks like a Hugging Face folder, complete or not."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE, "config.json"))


def local_folder(text: str) -> Path:
    """Return the folder that a setting names; for a name on the Hub, fetch it first.

    Only the safetensors files that transformers would load are fetched. Raises CheckpointError.
    """
    name = HubName.of(text)
    if name is None:
        return Path(text).expanduser()
    description = fetch_description(name)
    names = weight_files(description) if (description / INDEX).is_file() else [SINGLE]
    foreign = [each for each in names if not each.endswith(".safetensors")]
    if foreign:
        raise CheckpointError(
            f"{name}: its {INDEX} names {foreign[0]}, which is not a safetensors file; convert it with transformers'"
            " save_pretrained"
        )
    return fetch(name.at(description), [*DESCRIPTION, *names], required=names)


def weight_map(folder: Path) -> dict[str, str]:
    """Return tensor -> file of a folder's index. Raises CheckpointError for a damaged index or files elsewhere."""
    try:
        named: dict[str, str] = dict(parse((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        outside = [name for name in named.values() if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / INDEX} is not an index of weights ({error}); fetch it again"
        ) from error
    if outside:
        raise CheckpointError(f"{folder / INDEX} names files outside of its folder; fetch it again")
    return named


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights. Raises CheckpointError if there are none."""
    if (folder / INDEX).is_file():
        return sorted(set(weight_map(folder).values()))
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name one with config.json and safetensors files")
    remedy = "save it again with transformers, which writes safetensors"
    raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}; {remedy}")


def header_of(path: Path) -> Mapping[str, HeaderEntry]:
    """Return tensor -> entry of one file. Raises CheckpointError. Links are followed: the Hub's cache has them."""
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        return read_header(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from error


def headers(folder: Path, files: Sequence[str] | None = None) -> dict[str, Mapping[str, HeaderEntry]]:
    """Return file -> tensor -> entry; files: only these of the folder's.

    Raises CheckpointError if a file is damaged or two files have the same tensor.
    """
    by_file = {name: header_of(folder / name) for name in files or weight_files(folder)}
    seen: dict[str, str] = {}
    for file, entries in by_file.items():
        for name in entries:
            if name in seen:
                raise CheckpointError(f"{folder}: {name} is in {seen[name]} and in {file}; fetch it again")
            seen[name] = file
    return by_file
