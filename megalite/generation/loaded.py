"""A model with its tokenizer, read from any source: `megalite.load`."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from megalite.checkpoint.weights import fill
from megalite.convert.weights import load_adapters, open_weights
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.generation.inference_dtype import agreed_dtype, inference_notes
from megalite.generation.source import ModelSource, SourceOptions, find_source
from megalite.generation.stops import Stops, stops_of
from megalite.model.adapters import Adapters
from megalite.model.options import ModelOptions
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.model.transformer import Stage
from megalite.monitor.console import complain
from megalite.monitor.work import working
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest.decide import kernels_without_training
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, ready to generate.

    replica: this rank's share of the model; the whole model if loaded by `load`. source: where it was read from.
    adapters: those that requests may name.
    """

    replica: Replica
    tokenizer: Tokenizer
    source: ModelSource
    adapters: Adapters = field(default_factory=Adapters)

    @property
    def model(self) -> Stage:
        """The torch module, with parameters under Llama's Hugging Face names."""
        return self.replica.stage

    @property
    def config(self) -> ModelShape:
        """The sizes and the family of the model."""
        return self.replica.shape

    @cached_property
    def stops(self) -> Stops:
        """The tokens and texts that end a text of the model."""
        return stops_of(self.source, self.tokenizer)

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Return logits [B, S, V] for input_ids [B, S]; one process that holds the whole model."""
        positions = torch.arange(input_ids.shape[1], device=self.replica.mesh.device).unsqueeze(0)
        chunk = self.model.whole
        return chunk.logits(chunk.decode(input_ids.to(self.replica.mesh.device), positions))


def load(
    path: Path | str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **source: Unpack[SourceOptions],
) -> LoadedModel:
    """Load a model to generate from, whole, into this process.

    path: a run folder, a checkpoint, a Hugging Face folder, an adapter in PEFT's format, or org/name of the Hugging
        Face Hub. An adapter is merged into its base.
    device: None: the accelerator if there is one, else the CPU. dtype: of the weights and the computation; None: as
        `inference_dtype` chooses, float32 on a CPU and the weights' own type or bfloat16 on an accelerator.
    step: the checkpoint of this step instead of the latest one of a run folder.
    tokenizer: a Hugging Face folder or a tokenizer.json, instead of the model's own.
    base: the folder of the weights beside an adapter, where they have moved.
    adapters: name -> folder of a LoRA adapter that requests may name: PEFT's, a checkpoint or a run folder. `path` is
        then the Hugging Face folder of their base.
    Raises CheckpointError if there is no model, it is damaged, it has no tokenizer, or an adapter is not its own;
    ConfigError for a config.json whose model is not built; DataError for the tokenizer.
    """
    mesh = ParallelMesh.single(device or local_device(0, 1))
    return load_source(find_source(path, **source), mesh, dtype)


def build_model(
    shape: ModelShape, mesh: ParallelMesh, dtype: torch.dtype = torch.float32, *, int8: bool = False
) -> Replica:
    """Return this rank's part of a model without weights, ready to be loaded and to generate. Collective.

    int8: with linears of int8 weights.
    """
    split = pipeline_split(shape.num_hidden_layers, mesh.pp.size)
    operators = kernels_without_training(shape, dtype, mesh).operators
    options = ModelOptions(dtype=dtype, operators=operators, expert_dispatch="all_gather")
    return build_replica(shape, mesh, split, options, seed=None, int8=int8)


def load_shown(source: ModelSource, mesh: ParallelMesh, dtype: str | None) -> LoadedModel:
    """Load this rank's part of a model, as rank 0 shows. dtype: torch's name of it. As `load_source` otherwise."""
    number_type, why = agreed_dtype(source, mesh, None if dtype is None else getattr(torch, dtype))
    if mesh.rank == 0:
        for note in inference_notes(source, mesh.device, number_type, chosen=dtype is None, why=why):
            complain(note)
    with working(f"loading {source.folder}", shown=mesh.rank == 0):
        return load_source(source, mesh, number_type)


def load_source(source: ModelSource, mesh: ParallelMesh, dtype: torch.dtype | None = None) -> LoadedModel:
    """Load this rank's part of a model. Collective over the mesh. Raises CheckpointError, DataError.

    dtype: the same on all ranks; None: as `agreed_dtype` chooses.
    """
    dtype, _ = agreed_dtype(source, mesh, dtype)
    tokenizer = load_tokenizer(source.tokenizer, end_of_document=source.end_of_document)
    replica = build_model(source.read_shape, mesh, dtype, int8=source.int8)
    fill(replica, open_weights(source), source.folder)
    replica.require_weights()
    adapters = load_adapters(source.adapters, replica) if source.adapters else Adapters()
    return LoadedModel(replica, tokenizer, source, adapters)
