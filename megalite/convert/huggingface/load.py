"""Weights from a Hugging Face folder: every rank reads only the slices that it holds."""

from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.region_reader import TYPES, RegionReader
from megalite.checkpoint.weights import BLOCK_ELEMENTS, INT8_SCALE, WeightReader, require_no_others
from megalite.convert.finite import require_finite
from megalite.convert.foreign.new_run import new_run
from megalite.convert.foreign.streamed import ImportedRun, write_streamed
from megalite.convert.huggingface import block_fp8
from megalite.convert.huggingface.files import headers
from megalite.convert.huggingface.mxfp4 import WeightFile, with_packed_experts
from megalite.convert.huggingface.new_rows import NewRows
from megalite.convert.huggingface.origin import CONFIG, keep_origin
from megalite.convert.huggingface.packed import unpacked
from megalite.convert.huggingface.packed_header import SCALE, is_packed, scale_of, weights_of
from megalite.data.tokenizers.tokenizer import copy_tokenizer, special_token
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES
from megalite.families.tensors import STACKED, FamilyTensor
from megalite.topology.parameters import EMBEDDING, HEAD, HEAD_BIAS, canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

_VOCABULARY = (EMBEDDING, HEAD, HEAD_BIAS)
# Buffers that older exports hold beside the weights: masks and frequencies, which follow from the configuration.
BUFFERS = (
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    ".rotary_emb.inv_freq",
)


class HuggingFaceReader(WeightReader):
    """Reads regions of canonical tensors from a folder's safetensors files: of each the bytes it has, and no others."""

    def __init__(
        self, folder: Path, shape: ModelShape, *, new_rows: NewRows | None = None, int8: bool = False
    ):
        """new_rows: rows of the vocabulary that are the mean of others; the shape may have more rows than the files.

        int8: matrices of layers are int8, with scales. Raises CheckpointError when the files are missing or damaged, or
        do not hold exactly the tensors of the shape; the message names the tensors.
        """
        self._int8 = int8
        self._means: dict[str, Tensor] = {}
        self._new_rows = new_rows
        self._folder, self._shapes = folder, canonical_tensors(shape)
        by_file = headers(folder).items()
        self._files = [
            RegionReader(folder / name, dict(weights_of(header)) if int8 else header)
            for name, header in by_file
        ]
        names = FAMILIES[shape.family].names
        where: dict[str, WeightFile] = {name: opened for opened in self._files for name in opened.header}
        self._where = with_packed_experts(where) if names.interleaved else where
        for name in [*names.of_further_tokens(self._where, shape)]:
            del self._where[name]
        stacked = any(name.endswith(STACKED) for name in self._where)
        tensors = names.stacked(shape) if stacked else names.tensors(shape)
        self._tensors = {part: tensor for tensor in tensors for part in tensor.parts}
        # Files of the bare model have none, as the first ones published.
        bare = not any(name.startswith(names.optional_prefix) for name in self._where)
        self._prefix, self._head = names.optional_prefix if bare else "", names.of(HEAD)
        self._check(shape)
        vocabulary = [self._tensors[part] for part in _VOCABULARY if part in self._tensors]
        self._of_vocabulary = {self._head, *map(self._stored, vocabulary)}
        self._head_too = shape.tie_word_embeddings and self._head in self._where

    def close(self) -> None:
        for opened in self._files:
            opened.close()

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The types of the files' tensors; without those in FP8, which are read as float32."""
        kinds = (opened.header[name].dtype for name, opened in self._where.items())
        return {TYPES[kind] for kind in kinds if kind in TYPES}

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of one canonical tensor in the file's dtype; raises CheckpointError.

        state_key: INT8_SCALE: a region of the scales [rows, 1] of an int8 weight; else ignored, since the folder holds
        only weights.
        """
        tensor = self._tensors[name]
        stored = self._stored(tensor)
        regions = tensor.slices(name, region, self._shapes)
        if state_key == INT8_SCALE:
            pieces = [self._region(f"{stored}{SCALE}", each) for each in regions]
        else:
            pieces = [self._region(stored, each, transposed=tensor.transposed) for each in regions]
        values = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if state_key != INT8_SCALE:
            values = tensor.part_from(name, values)
        if name == EMBEDDING and self._head_too and not torch.equal(self._region(self._head, region), values):
            raise CheckpointError(
                f"{self._folder}: {self._head} differs from the embedding, but its config.json ties the two; set"
                ' "tie_word_embeddings": false there, or use the config.json of these weights'
            )
        return values

    def _region(self, name: str, region: TensorSlice, *, transposed: bool = False) -> Tensor:
        """That of a tensor of the files; `transposed`: they hold it so, and the region is that of what we hold."""
        if self._new_rows is not None and name in self._of_vocabulary and not transposed:
            return self._with_new_rows(name, region, self._new_rows)
        return self._of_file(name, region, transposed=transposed)

    def _of_file(self, name: str, region: TensorSlice, *, transposed: bool = False) -> Tensor:
        opened = self._where[name]
        stored = TensorSlice(region.offsets[::-1], region.shape[::-1]) if transposed else region
        try:
            values = opened.read(name, stored)
        except OSError as error:
            raise CheckpointError(f"{opened.path} cannot be read ({error}); fetch it again") from error
        if values.dtype == torch.int8:
            return unpacked(values)
        if values.dtype == torch.float8_e4m3fn:
            of_blocks = self._of_file(f"{name}{block_fp8.SCALE}", block_fp8.region_of_scales(stored))
            values = block_fp8.scaled(values, of_blocks, stored)
        require_finite(values, name, opened.path, stored.offsets)
        return values.t() if transposed else values

    def _with_new_rows(self, name: str, region: TensorSlice, new: NewRows) -> Tensor:
        """Return a region of a tensor over the vocabulary; rows that are new, or that the files lack, are the mean."""
        (start, *columns), (count, *width) = region.offsets, region.shape
        stored_rows = min(count, max(0, self._where[name].header[name].shape[0] - start))
        added = new.added_in(start, stored_rows)
        if stored_rows == count and not added:
            return self._of_file(name, region)
        if name not in self._means:
            self._means[name] = self._mean(name, new)
        mean = self._means[name]
        for dim, (first, size) in enumerate(zip(columns, width, strict=True)):
            mean = mean.narrow(dim, first, size)
        values = mean.expand(count, *width).clone()
        if stored_rows:
            values[:stored_rows] = self._of_file(name, TensorSlice(region.offsets, (stored_rows, *width)))
            values[added] = mean
        return values

    def _mean(self, name: str, new: NewRows) -> Tensor:
        """Return the mean of the rows of a tensor of the files that tokens use, read in blocks."""
        shape = self._where[name].header[name].shape
        rows, counted = shape[0], 0
        block = max(1, BLOCK_ELEMENTS // max(1, prod(shape[1:])))
        total = torch.zeros(shape[1:], dtype=torch.float64)
        for start in range(0, rows, block):
            part = (min(block, rows - start), *shape[1:])
            values = self._of_file(name, TensorSlice((start, *[0] * (len(shape) - 1)), part))
            used = new.used_in(start, part[0])
            counted += int(used.sum())
            total += values[used].double().sum(dim=0)
        return (total / max(1, counted)).to(values.dtype)

    def _fits(self, tensor: FamilyTensor, stored: tuple[int, ...]) -> bool:
        """Whether a tensor of the files has the shape of the model's, or fewer rows of the vocabulary."""
        enlarged = self._new_rows is not None and tensor.parts[0] in _VOCABULARY
        fewer = enlarged and 0 < stored[0] < tensor.shape[0]
        return stored[1:] == tensor.shape[1:] and (fewer or stored[:1] == tensor.shape[:1])

    def _check(self, shape: ModelShape) -> None:
        expected = {self._stored(tensor): tensor for tensor in self._tensors.values()}
        int8 = {name: tensor for name, tensor in expected.items() if self._int8 and is_packed(tensor)}
        expected |= {f"{name}{SCALE}": scale_of(tensor) for name, tensor in int8.items()}
        fp8 = {name: tensor for name, tensor in expected.items() if self._is_fp8(name)}
        expected |= {f"{name}{block_fp8.SCALE}": block_fp8.scale_of(tensor) for name, tensor in fp8.items()}
        missing = expected.keys() - self._where.keys()
        extra = {name for name in self._where.keys() - expected.keys() if not name.endswith(BUFFERS)}
        if shape.tie_word_embeddings and self._head in extra and self._is_like_the_embedding(self._head):
            extra.remove(self._head)  # whether it is the same, each rank sees with what it reads
        require_no_others(self._folder, missing, extra, "use the config.json of these weights")
        for name, tensor in expected.items():
            stored = self._where[name].header[name]
            if not self._fits(tensor, stored.shape):
                raise CheckpointError(
                    f"{self._folder}: {name} has shape {stored.shape}, but its config.json gives {tensor.shape};"
                    " use the config.json of these weights"
                )
            types = ("I8",) if name in int8 else tuple(TYPES)
            if name not in fp8 and stored.dtype not in types:
                raise CheckpointError(
                    f"{self._folder}: {name} is of {stored.dtype}; use weights of {', '.join(types)}"
                )

    def _is_fp8(self, name: str) -> bool:
        """Whether a tensor of the files is in FP8 with a factor for each block."""
        opened, scales = self._where.get(name), f"{name}{block_fp8.SCALE}"
        return opened is not None and opened.header[name].dtype == block_fp8.FP8 and scales in self._where

    def _stored(self, tensor: FamilyTensor) -> str:
        return tensor.name.removeprefix(self._prefix) if self._prefix else tensor.name

    def _is_like_the_embedding(self, name: str) -> bool:
        """Return an empty tensor of the embedding's shape and type."""
        theirs = self._stored(self._tensors[EMBEDDING])
        if theirs not in self._where:
            return False
        entry, embedding = self._where[name].header[name], self._where[theirs].header[theirs]
        return (entry.shape, entry.dtype) == (embedding.shape, embedding.dtype)


def import_checkpoint(folder: Path, shape: ModelShape, run_folder: Path) -> Path:
    """Write a folder's weights as a checkpoint without optimizer state: step 0 of a run; one process.

    Its tokenizer files come along to `run_folder`/tokenizer. Raises CheckpointError as HuggingFaceReader does, and
    where the run has a checkpoint already.
    """

    with new_run(run_folder), HuggingFaceReader(folder, shape) as reader:
        tokenizer = take_tokenizer(folder, run_folder)
        keep_origin(folder / CONFIG, run_folder)
        config = {"model": {"weights": str(folder)}, "tokenizer": tokenizer}
        return write_streamed(run_folder, ImportedRun(shape, config), reader)


def take_tokenizer(folder: Path, run_folder: Path) -> dict[str, Any]:
    """Copy a folder's tokenizer, if it has one, to `run_folder`/tokenizer; what a run's configuration says of it."""
    if all((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        copy_tokenizer(folder, run_folder / "tokenizer")
    return {"end_of_document": special_token(folder, "eos_token")}
