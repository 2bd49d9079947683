"""Write a Hugging Face folder with the first layers of another one: the same model, only less deep. No torch."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.tensor_header import HeaderEntry
from megalite.config.sources.hub import DESCRIPTION, INDEX
from megalite.convert.huggingface.files import SINGLE, headers, weight_files, weight_map
from megalite.convert.huggingface.origin import CONFIG, read_object
from megalite.families.registry import FAMILIES
from megalite.topology.shape import ModelShape

# Keys of config.json with a value for each layer, with indices of layers, and with a number of layers behind the last.
_PER_LAYER, _INDICES = ("layer_types", "no_rope_layers"), ("mlp_only_layers",)
_BEHIND = ("num_nextn_predict_layers", "num_mtp_layers")
_BLOCK_BYTES = 16 << 20


def write_first_layers(folder: Path, shape: ModelShape, destination: Path) -> None:
    """Write the layers of `shape`, the embedding, the final norm and the head of a folder to a new folder.

    shape: the folder's with fewer layers. Files without a tensor of these need not be there. In memory is one block of
    a tensor at a time. Raises CheckpointError for damaged files, OSError where `destination` cannot be written.
    """
    destination.mkdir()
    config = _cut(read_object(folder / CONFIG, "fetch it again"), shape)
    (destination / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    for name in set(DESCRIPTION) - {CONFIG, INDEX}:
        if (folder / name).is_file():
            (destination / name).symlink_to((folder / name).resolve())
    names = FAMILIES[shape.family].names
    prefix = re.escape(names.optional_prefix), re.escape(names.layers.removeprefix(names.optional_prefix))
    layer_of = re.compile(r"(?:{})?{}\.(\d+)\.".format(*prefix))

    def is_kept(name: str) -> bool:
        layer = layer_of.match(name)
        return layer is None or int(layer[1]) < shape.num_hidden_layers

    if (folder / INDEX).is_file():
        files: Collection[str] = {file for name, file in weight_map(folder).items() if is_kept(name)}
    else:
        files = weight_files(folder)
    kept = {
        name: (folder / file, entry)
        for file, entries in headers(folder, sorted(files)).items()
        for name, entry in entries.items()
        if is_kept(name)
    }
    _write(destination / SINGLE, kept)


def _cut(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return a config.json with the layers of `shape`."""
    layers = shape.num_hidden_layers
    lists = {key: value for key, value in config.items() if isinstance(value, list)}
    return {
        **config,
        FAMILIES[shape.family].keys["num_hidden_layers"]: layers,
        **{key: lists[key][:layers] for key in _PER_LAYER if key in lists},
        **{key: [layer for layer in lists[key] if layer < layers] for key in _INDICES if key in lists},
        **{key: 0 for key in _BEHIND if config.get(key)},
    }


def _write(path: Path, tensors: Mapping[str, tuple[Path, HeaderEntry]]) -> None:
    """Write a safetensors file of tensors that stand in other files; of any type, since no value is read."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name, (_, entry) in tensors.items():
        span = [reached, reached := reached + entry.stop - entry.start]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for source, entry in tensors.values():
            file.writelines(_blocks(source, entry))


def _blocks(source: Path, entry: HeaderEntry) -> Iterator[bytes]:
    with source.open("rb") as file:
        file.seek(entry.start)
        for start in range(entry.start, entry.stop, _BLOCK_BYTES):
            yield file.read(min(_BLOCK_BYTES, entry.stop - start))
