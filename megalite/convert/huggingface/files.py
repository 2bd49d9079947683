"""The weight files of a Hugging Face folder: which there are, and what their headers say. No torch."""

from collections.abc import Mapping
from pathlib import Path

from megalite.checkpoint.strict_json import parse
from megalite.checkpoint.tensor_header import HeaderEntry, read_header
from megalite.config.hub import DESCRIPTION, INDEX, HubName, fetch, fetch_description
from megalite.errors import CheckpointError

SINGLE = "model.safetensors"


def is_folder_of_weights(folder: Path) -> bool:
    """Whether this looks like one, be it whole or not."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE, "config.json"))


def local_folder(text: str) -> Path:
    """The folder of weights that a setting names: one here, or one of the Hub, whose weights are fetched.

    Of a Hub's folder exactly the safetensors files that transformers would load. Raises CheckpointError.
    """
    name = HubName.of(text)
    if name is None:
        return Path(text).expanduser()
    description = fetch_description(name)
    names = weight_files(description) if (description / INDEX).is_file() else [SINGLE]
    foreign = [each for each in names if not each.endswith(".safetensors")]
    if foreign:
        raise CheckpointError(f"{name}: its {INDEX} names {foreign[0]}, which is no file of safetensors")
    return fetch(name.at(description), [*DESCRIPTION, *names], required=names)


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold the weights; raises CheckpointError where they are not to be known."""
    if (folder / INDEX).is_file():
        try:
            names = set(parse((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            outside = [name for name in names if Path(name).name != name]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is not an index of weights ({error})") from error
        if outside:
            raise CheckpointError(f"{folder / INDEX} names files outside of its folder")
        return sorted(names)
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name one with config.json and safetensors files")
    remedy = "save it again with transformers, which writes safetensors"
    raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}; {remedy}")


def header_of(path: Path) -> Mapping[str, HeaderEntry]:
    """Tensor -> entry of one file. Raises CheckpointError; a link is followed, as the Hub's cache is made of them."""
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        return read_header(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from error


def headers(folder: Path) -> dict[str, Mapping[str, HeaderEntry]]:
    """File -> tensor -> entry. Raises CheckpointError where a file is damaged or two hold the same tensor."""
    found = {name: header_of(folder / name) for name in weight_files(folder)}
    seen: dict[str, str] = {}
    for file, entries in found.items():
        for name in entries:
            if name in seen:
                raise CheckpointError(f"{folder}: {name} is in {seen[name]} and in {file}; fetch it again")
            seen[name] = file
    return found
