"""Weights from a Hugging Face folder: every rank reads only the slices that it holds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megalite.checkpoint.families import FamilyTensor, family_tensors
from megalite.checkpoint.hf_files import headers
from megalite.checkpoint.load import load_parameter
from megalite.checkpoint.save import all_or_none
from megalite.checkpoint.step_zero import write_step_zero
from megalite.data.tokenizer import copy_tokenizer
from megalite.errors import CheckpointError
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.layout import PipelineSplit, pipeline_split
from megalite.topology.parameters import EMBEDDING, HEAD, ModelShape, canonical_tensors, stage_parameters
from megalite.topology.sharding import Box

# What older exports hold beside the weights: masks and frequencies, which follow from the configuration.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_GPT2_PREFIX = "transformer."
_TYPES = ("F64", "F32", "BF16", "F16")


def load_huggingface(
    folder: Path, *, mesh: ParallelMesh, shape: ModelShape, split: PipelineSplit, stage: nn.Module
) -> None:
    """Fill this rank's stage from a folder that transformers could load; collective over the world.

    Raises CheckpointError, on every rank alike, when the files are missing or damaged, or do not hold exactly the
    tensors of `shape`; the message names the tensors.
    """

    def load() -> None:
        reader = HuggingFaceReader(folder, shape)
        tensors = dict(stage.named_parameters())
        for parameter in stage_parameters(shape, split, mesh.at.pp):
            load_parameter(reader, parameter, tensors[parameter.name], mesh)

    all_or_none(mesh, "import", folder, load)


class HuggingFaceReader:
    """Reads regions of canonical tensors from a folder's safetensors files, one slice in memory at a time."""

    def __init__(self, folder: Path, shape: ModelShape):
        self._folder, self._shapes = folder, canonical_tensors(shape)
        self._tensors = {part: tensor for tensor in family_tensors(shape) for part in tensor.parts}
        self._files = _open_files(folder)
        self._names = {
            name: file
            for file, opened in self._files.items()
            for name in opened.keys()  # noqa: SIM118
        }
        if shape.family == "gpt2" and not any(name.startswith(_GPT2_PREFIX) for name in self._names):
            self._prefix = _GPT2_PREFIX  # files of the bare model, as the first ones published were
        else:
            self._prefix = ""
        self._check(shape)

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """A region of one canonical tensor, in the type of the file."""
        tensor = self._tensors[name]
        first = sum(self._shapes[part][0] for part in tensor.parts[: tensor.parts.index(name)])
        spans = [slice(start, start + size) for start, size in zip(box.offsets, box.shape, strict=True)]
        spans[0] = slice(spans[0].start + first, spans[0].stop + first)
        values: Tensor = self._slice(tensor.name)[tuple(reversed(spans) if tensor.transposed else spans)]
        return values.t() if tensor.transposed else values

    def _slice(self, name: str) -> Any:
        stored = name.removeprefix(self._prefix) if self._prefix else name
        return self._files[self._names[stored]].get_slice(stored)

    def _check(self, shape: ModelShape) -> None:
        expected = {self._stored(tensor): tensor for tensor in self._tensors.values()}
        missing = sorted(expected.keys() - self._names.keys())
        extra = sorted(name for name in self._names.keys() - expected.keys() if not name.endswith(BUFFERS))
        if shape.tie_word_embeddings and HEAD in extra and self._head_is_the_embedding():
            extra.remove(HEAD)
        if missing or extra:
            parts = [f"lacks {_listed(missing)}"] if missing else []
            parts += [f"has {_listed(extra)}, which the model has not"] if extra else []
            raise CheckpointError(
                f"{self._folder} {' and '.join(parts)}; is its config.json that of these weights?"
            )
        for name, tensor in expected.items():
            stored = self._files[self._names[name]].get_slice(name)
            found, kind = tuple(stored.get_shape()), stored.get_dtype()
            if found != tensor.shape:
                raise CheckpointError(f"{self._folder}: {name} is {found}, the model's is {tensor.shape}")
            if kind not in _TYPES:
                raise CheckpointError(
                    f"{self._folder}: {name} is of {kind}; use weights of {', '.join(_TYPES)}"
                )

    def _stored(self, tensor: FamilyTensor) -> str:
        return tensor.name.removeprefix(self._prefix) if self._prefix else tensor.name

    def _head_is_the_embedding(self) -> bool:
        embedding = self._slice(self._tensors[EMBEDDING].name)[:]
        return torch.equal(self._files[self._names[HEAD]].get_tensor(HEAD), embedding)


def _open_files(folder: Path) -> Mapping[str, Any]:
    return {name: _open(folder / name) for name in headers(folder)}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from error


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def import_checkpoint(folder: Path, shape: ModelShape, run_folder: Path) -> Path:
    """Write a folder's weights as a checkpoint without optimizer state: step 0 of a run; one process, the model once.

    Its tokenizer files come along to `run_folder`/tokenizer. Raises CheckpointError as load_huggingface does, and
    where the run has a checkpoint already.
    """

    def fill(stage: nn.Module) -> None:
        mesh, split = ParallelMesh.single(), pipeline_split(shape.num_hidden_layers)
        load_huggingface(folder, mesh=mesh, shape=shape, split=split, stage=stage)
        config["tokenizer"] = take_tokenizer(folder, run_folder)

    config: dict[str, Any] = {"model": {"weights": str(folder)}}
    return write_step_zero(run_folder, shape, fill, config)


def take_tokenizer(folder: Path, run_folder: Path) -> dict[str, Any]:
    """Copy a folder's tokenizer, if it has one, to `run_folder`/tokenizer; what a run's configuration says of it."""
    if (folder / "tokenizer.json").is_file():
        copy_tokenizer(folder, run_folder / "tokenizer")
    return {"end_of_document": _end_of_text(folder)}


def _end_of_text(folder: Path) -> str | None:
    """The tokenizer's own word for it, as plain text."""
    try:
        content = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        token = content.get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token
