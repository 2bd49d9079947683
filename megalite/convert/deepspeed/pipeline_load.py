"""A checkpoint of DeepSpeed's pipeline engine as the first one of a run, and the lines that describe it."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from megalite.checkpoint.manifest import WEIGHT
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.deepspeed import neox_settings
from megalite.convert.deepspeed.megatron_deepspeed import DIALECT, megatron_deepspeed_shape
from megalite.convert.deepspeed.model_states import ModelStates
from megalite.convert.deepspeed.neox_settings import DOWN_NAMES, Sizes, neox_dialect, neox_shape
from megalite.convert.deepspeed.pipeline_files import arguments_of
from megalite.convert.deepspeed.pipeline_folder import PipelineFolder, open_pipeline_folder
from megalite.convert.deepspeed.pipeline_names import Dialect
from megalite.convert.deepspeed.pipeline_reader import Layers, PipelineReader, open_reader, survey
from megalite.convert.deepspeed.pipeline_states import PipelineStates
from megalite.convert.foreign.adamw import MOMENTS, trained_with
from megalite.convert.foreign.checkpoint import ForeignCheckpoint, ImportOptions
from megalite.convert.foreign.inspect import tensor_lines
from megalite.convert.foreign.streamed import ImportedRun
from megalite.convert.foreign.unpickle import require_undamaged
from megalite.convert.megatron.arguments import OF_INTEREST as MEGATRON_NAMES
from megalite.errors import CheckpointError, counted, listed
from megalite.topology.shape import ModelShape


def open_checkpoint(place: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a checkpoint of GPT-NeoX or Megatron-DeepSpeed, with the optimizer's states where its files have them.

    Raises CheckpointError where the model cannot be expressed, or the files are damaged or not whole.
    """
    folder = open_pipeline_folder(place)
    layers = survey(folder)
    shape, dialect = _model(layers, options)
    reader = open_reader(layers, shape, dialect, layers.vocabulary_rows())
    for path in folder.files:
        require_undamaged(path)
    reader.notes.extend(_notes(layers, shape, dialect))
    state = ModelStates.open(folder.states[0]) if folder.states else ModelStates(place, {})
    step = state.count("iteration", "global_steps", default=0)
    states = _open_states(folder, reader)
    if states is None:
        run = ImportedRun(shape, {"model": {"weights": str(place)}}, reader.dtype)
        return ForeignCheckpoint(run, reader, step, options.hf_config, reader.notes)
    _check_sizes(reader, states)
    reader.states = states.read
    counters = {"step": step, "samples": state.count("global_samples", default=0), "tokens": 0}
    run = ImportedRun(
        shape,
        {"optimizer": {"name": "adamw", **states.settings}},
        state_keys=(WEIGHT, *MOMENTS),
        trainer_state={**counters, "skipped_steps": state.count("skipped_steps", default=0)},
        optimizer=states.scalars,
    )
    reader.notes.extend(trained_with(states.settings))
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(reader.dtype)
    return ForeignCheckpoint(run, reader, step, options.hf_config, reader.notes, precision)


def _open_states(folder: PipelineFolder, reader: PipelineReader) -> PipelineStates | None:
    """Return the optimizer's states; None, with a note, where ZeRO 0 has saved none that can be named."""
    if not folder.states:
        reader.notes.append(
            "weights alone, as the first step of a new run, since the folder has no mp_rank files"
        )
        return None
    try:
        return PipelineStates(folder)
    except CheckpointError as error:
        if folder.optimizers:
            raise
        reader.notes.append(f"weights alone, as the first step of a new run, since {error}")
        return None


def _model(layers: Layers, options: ImportOptions) -> tuple[ModelShape, Dialect]:
    """Return the model's shape, with the vocabulary that was asked for, and its program's names."""
    names, rows = set(layers.decoder_layer), layers.vocabulary_rows()
    vocab_size = rows if options.vocab_size is None else options.vocab_size
    if not 0 < vocab_size <= rows:
        raise CheckpointError(
            f"{layers.folder.path}: the embedding has {rows} rows; set --vocab-size to {rows} or less"
        )
    arguments, is_megatron = arguments_of(layers.folder)
    if is_megatron:
        return megatron_deepspeed_shape(arguments, vocab_size), DIALECT
    if options.hf_config is not None:
        shape = shape_of_folder(str(options.hf_config))
        shape = shape if options.vocab_size is None else replace(shape, vocab_size=vocab_size)
        if shape.vocab_size > rows:
            raise CheckpointError(
                f"{layers.folder.path}: the embedding has {rows} rows, but {options.hf_config} gives vocab_size"
                f" {shape.vocab_size}; name this model's config.json, or set --vocab-size to {rows} or less"
            )
        return shape, neox_dialect(shape, names)
    if "hidden_size" not in arguments.table or not arguments.source.is_dir():
        raise CheckpointError(
            f"{arguments.source} is missing, which has GPT-NeoX's settings; put the .yml files of the run there, or"
            " name a config.json of the model with --hf-config"
        )
    down = next((name for name in DOWN_NAMES if name in names), DOWN_NAMES[0])
    shape = neox_shape(arguments, names, Sizes(vocab_size, layers.columns(down)))
    return shape, neox_dialect(shape, names)


def _notes(layers: Layers, shape: ModelShape, dialect: Dialect) -> Iterator[str]:
    """Yield what a user should know of the model's tensors."""
    rows, ranks = layers.vocabulary_rows(), layers.folder.model_ranks
    if dialect.program == "GPT-NeoX" and (unknown := neox_settings.unknown_keys(layers.folder.path)):
        configs = layers.folder.path / neox_settings.CONFIGS
        yield f"{configs} has keys that megalite does not know, and ignores: {listed(unknown)}"
    if shape.vocab_size == rows:
        yield (
            f"all {rows:,} rows of the embedding were taken, the padding of the vocabulary included; --vocab-size N"
            " takes N"
        )
    if dialect.output_biases == "terms" and ranks > 1 and shape.attention_output_bias:
        yield (
            f"the biases of attention.dense and of the MLP's output are sums over {ranks} model-parallel ranks, each of"
            " which trained its own term: the sum moved by as many times the learning rate, and from here on by one"
        )
    if (
        dialect.program == "GPT-NeoX"
        and shape.num_key_value_heads != shape.num_attention_heads
        and dialect.qkv is None
    ):
        yield (
            "query, key and value were taken one after the other, as GPT-NeoX has them since 14 November 2024; earlier"
            " versions interleave them, which the files do not say: compare a loss"
        )


def _check_sizes(reader: PipelineReader, states: PipelineStates) -> None:
    """Raise CheckpointError for a tensor that the optimizer's files lack, or have in another size."""
    ranks = reader.folder.model_ranks
    for tensor in reader.stored.values():
        expected, layer = prod(tensor.rank_shape(ranks) or ()), reader.roles[tensor.role]
        for rank in range(ranks):
            if (size := states.numel(layer, rank, tensor.name)) != expected:
                raise CheckpointError(
                    f"{reader.folder.path} has {size} elements of optimizer state of {tensor.name} of layer {layer},"
                    f" but the weights {expected}; fetch the files of one step"
                )


def describe(place: Path) -> Iterator[str]:
    """Yield the lines of `megalite convert inspect`, of a model that can be built here or not; no tensor is read."""
    folder = open_pipeline_folder(place)
    layers = survey(folder)
    arguments, is_megatron = arguments_of(folder)
    program = "Megatron-DeepSpeed" if is_megatron else "GPT-NeoX"
    layout = f"model {folder.model_ranks} x pipeline {folder.stages}"
    if folder.optimizers:
        layout += f" x data {len(folder.optimizers[0])}"
    yield f"{place}: a checkpoint of DeepSpeed's pipeline engine of {layout}, with the names of {program}"
    state = ModelStates.open(folder.states[0]) if folder.states else ModelStates(place, {})
    step, samples = (
        state.count("iteration", "global_steps", default=0),
        state.count("global_samples", default=0),
    )
    yield f"  step {step:,}, {samples:,} sequences"
    size_bytes = sum(path.stat().st_size for path in folder.files)
    yield f"  {size_bytes:,} bytes in {counted(len(folder.files), 'file')}"
    table, interesting = arguments.table, MEGATRON_NAMES if is_megatron else neox_settings.OF_INTEREST
    yield f"  args: {', '.join(f'{name} {table[name]}' for name in interesting if name in table)}"
    if not is_megatron and (foreign := list(neox_settings.not_built(arguments))):
        yield f"  not supported: {', '.join(foreign)}"
    for layer, entries in sorted(layers.entries.items()):
        yield f"layer {layer}: {len(entries)} tensors, as model rank 0 has them"
        yield from tensor_lines(entries)
