"""Export with int8 linears: a plain export, checked against transformers, then its matrices rounded row by row."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.durable import write_durably
from megalite.checkpoint.reader import BLOCK_ELEMENTS
from megalite.checkpoint.region_reader import TYPES, RegionReader
from megalite.checkpoint.regions import full_slice, rows_of
from megalite.checkpoint.tensor_file import TensorInfo, write_tensor_file
from megalite.checkpoint.tensor_header import HeaderEntry
from megalite.config.sources.hub import INDEX
from megalite.config.sources.huggingface import shape_of_folder
from megalite.config.sources.quantisation import KEY, int8_config
from megalite.convert.exported_folder import exported_folder
from megalite.convert.huggingface.export import CARD, Export
from megalite.convert.huggingface.files import headers
from megalite.convert.huggingface.model_card import is_our_card, quantised_card
from megalite.convert.huggingface.origin import CONFIG
from megalite.convert.huggingface.packed import pack
from megalite.convert.huggingface.packed_header import (
    PACKED,
    PER_WORD,
    SCALE,
    SHAPE,
    is_packed,
    require_packed,
)
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, family_tensors
from megalite.ops.linear import quantise_rows
from megalite.topology.experts import ROUTER, MixtureShape
from megalite.topology.parameters import HEAD
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class Int8Export:
    """A published int8 folder. plain: the export that was quantised, which is gone. sizes: bytes of weights, of both.

    perplexities: before and after, if they were asked for.
    """

    plain: Export
    folder: Path
    sizes: tuple[int, int]
    perplexities: tuple[float, float] | None


def export_int8(
    destination: Path, export: Callable[[Path], Export], perplexity: Callable[[Path], float] | None = None
) -> Int8Export:
    """Write a folder whose projections of attention, MLPs and experts are int8, in compressed-tensors' form.

    export: writes the plain export into a folder. perplexity: of a folder's model.
    The folder appears only when all is done. Raises CheckpointError as `export` does, and for a family whose matrices
    are stored transposed.
    """
    with exported_folder(
        destination, "a Hugging Face export", lambda folder: is_our_card(folder / CARD)
    ) as partial:
        whole = partial / "plain"
        plain = export(whole)
        sizes = quantise_folder(whole, partial)
        perplexities = None if perplexity is None else (perplexity(whole), perplexity(partial))
        shutil.rmtree(whole)
    return Int8Export(plain, destination, sizes, perplexities)


def quantise_folder(source: Path, destination: Path) -> tuple[int, int]:
    """Write a plain export with int8 matrices into an empty or new folder; return the bytes of weights of both.

    Some rows of one matrix are in memory at a time. Raises CheckpointError for a model that the form cannot hold.
    """
    shape = shape_of_folder(str(source))
    chosen = _chosen(shape)
    by_file = headers(source)
    weights: dict[str, str] = {}
    for name, header in by_file.items():
        infos = dict(_infos(header, chosen))
        with closing(RegionReader(source / name, header)) as opened:
            write_tensor_file(destination / name, infos, _Rows(opened, chosen))
        weights |= dict.fromkeys(infos, name)
    if (source / INDEX).is_file():
        size = sum((destination / name).stat().st_size for name in by_file)
        index = {"metadata": {"total_size": size}, "weight_map": weights}
        write_durably(destination / INDEX, json.dumps(index, indent=2) + "\n")
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    names = FAMILIES[shape.family].names
    ignored = [names.of(HEAD).removesuffix(".weight")]
    if isinstance(shape, MixtureShape):
        ignored.append(f"re:.*{names.modules.get(ROUTER, ROUTER)}$")
    content = {**config, KEY: int8_config(ignored)}
    write_durably(destination / CONFIG, json.dumps(content, indent=2) + "\n")
    card = (source / CARD).read_text(encoding="utf-8")
    write_durably(destination / CARD, quantised_card(card))
    for path in source.iterdir():
        if path.name not in {*by_file, INDEX, CONFIG, CARD}:
            shutil.copyfile(path, destination / path.name)
    before, after = (sum((at / name).stat().st_size for name in by_file) for at in (source, destination))
    return before, after


def _chosen(shape: ModelShape) -> frozenset[str]:
    """Return the tensors of the family's folder to quantise."""
    tensors = [tensor for tensor in family_tensors(shape) if is_packed(tensor)]
    if not tensors:
        raise CheckpointError(
            f"compressed-tensors has no form for {shape.family}, whose files hold matrices transposed; export without"
            " --quantise"
        )
    if isinstance(shape, MixtureShape):
        require_packed(shape)
    for tensor in tensors:
        if tensor.shape[1] % PER_WORD:
            raise CheckpointError(
                f"{tensor.name} has {tensor.shape[1]} columns, not a multiple of {PER_WORD}, which the int8 form needs;"
                " export without --quantise"
            )
    return frozenset(tensor.name for tensor in tensors)


def _infos(header: Mapping[str, HeaderEntry], chosen: frozenset[str]) -> Iterator[tuple[str, TensorInfo]]:
    for name, entry in header.items():
        dtype = TYPES[entry.dtype]
        if name not in chosen:
            yield name, TensorInfo(dtype, entry.shape)
            continue
        rows, columns = entry.shape
        yield f"{name}{PACKED}", TensorInfo(torch.int32, (rows, columns // PER_WORD))
        yield f"{name}{SCALE}", TensorInfo(dtype, (rows, 1))
        yield f"{name}{SHAPE}", TensorInfo(torch.int64, (2,))


class _Rows:
    """Reads a plain file's tensors as those of the int8 file, in blocks of rows."""

    def __init__(self, opened: RegionReader, chosen: frozenset[str]):
        self._opened, self._chosen = opened, chosen

    def __call__(self, key: str) -> Iterator[Tensor]:
        for ending in (PACKED, SCALE, SHAPE):
            name = key.removesuffix(ending)
            if name == key or name not in self._chosen:
                continue
            if ending == SHAPE:
                yield torch.tensor(self._opened.header[name].shape)
                return
            for block in self._blocks(name):
                values, scale = quantise_rows(block, block.dtype)
                yield pack(values) if ending == PACKED else scale
            return
        yield from self._blocks(key)

    def _blocks(self, name: str) -> Iterator[Tensor]:
        for region in rows_of(full_slice(self._opened.header[name].shape), BLOCK_ELEMENTS):
            yield self._opened.read(name, region)
