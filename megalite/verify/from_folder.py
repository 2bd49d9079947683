"""Compare a Hugging Face folder in transformers with megalite's own training of it, in any layout.

Both compute one step in float32 on the same samples. transformers takes the place of the one process.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from megalite.config.flags import COMMAND_LINE
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.huggingface.files import local_folder
from megalite.convert.huggingface.first_layers import write_first_layers
from megalite.data.files.token_file import TokenWriter, bin_path, idx_path
from megalite.errors import CheckpointError, ConfigError, Problem
from megalite.launcher.local import LocalStart
from megalite.launcher.process import available_memory_bytes
from megalite.launcher.rank.detect import local_rank_infos
from megalite.launcher.rank.environment import prepare_process
from megalite.monitor.preparation import PreparationConsole
from megalite.topology.parameters import model_parameters, parameter_count
from megalite.topology.shape import ModelShape
from megalite.verify.certificate import Certificate, config_sha256, versions, worst_of
from megalite.verify.findings import INITIAL, LOSS, NORM, OUTPUT, OWN, SUMMED, Departure, Worst
from megalite.verify.run import apart, train_ranks
from megalite.verify.scratch import scratch_explained
from megalite.verify.shrink import alone

if TYPE_CHECKING:
    from megalite.train.inputs import RunInputs
    from megalite.verify.record import RecordJob

_SEQUENCE, _TOKENS = 64, 1 << 16
# At the peak, as records are compared: those of both sides, float64 copies of the largest tensor, torch in each rank.
_BYTES_A_PARAMETER, _BYTES_OF_THE_LARGEST, _BYTES_OF_TORCH = 40, 32, 400 << 20
# Gradients of queries and keys, where attention has hardly begun to differ from a mean, are small differences of large
# numbers: on such a model 4 texts of 16 gave more than 3e-5, and 4.5e-5 was the worst.
_GRADIENT_RTOL = 3e-4
# A setting that another program's model has not, or that a single step has no use for.
_PLAIN = {
    "training": {
        **{"precision": "fp32", "tf32": "false", "steps": "1", "epochs": "unset", "label_smoothing": "0"},
        **{"z_loss": "0", "router_balance": "0", "router_z": "0", "router_bias_rate": "0"},
    },
    "model": dict.fromkeys(
        ("embedding_dropout", "residual_dropout", "mlp_dropout", "attention_dropout"), "0"
    ),
    "data": {
        **{"kind": "text", "blend": "unset", "validation": "unset", "split": "unset", "order": "megalite"},
        **{"document_mask": "false", "length_buckets": "unset", "streaming": "unset"},
    },
    "optimizer": {"schedule": "constant", "warmup_steps": "0"},
    "adapter": {"kind": "none"},
}


@dataclass(frozen=True)
class FolderCertificate(Certificate):
    """A certificate whose other side is transformers' model of `folder`."""

    folder: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the certificate for people."""
        first, *others = super().lines()
        part = "" if self.full_size else "the first layers of "
        computes = f"{self.layout} computes the loss and gradients that transformers computes of {part}"
        yield f"holds: {computes}{self.folder}, in {self.precision}" if self.holds else first
        yield from others


def verify_folder(
    named: str,
    run_file: Path | None = None,
    flags: Sequence[str] = (),
    *,
    text: Path | None = None,
    layers: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> FolderCertificate:
    """Compare the weights, logits, loss and gradients of a folder, or of org/name on the Hub, and certify them.

    run_file, flags: the layout, and all else that is set but what the comparison needs otherwise. text: a file of
    samples, read with the folder's tokenizer; None: random tokens. layers: compare a model of only so many first
    layers. Raises ConfigError, CheckpointError, and MegaliteError as training does.
    """
    started = time.monotonic()
    folder = local_folder(named)
    if not folder.is_dir():
        raise CheckpointError(f"{named} is not a folder; name one with config.json and safetensors files")
    _refuse_run_folder(folder)
    whole = shape_of_folder(str(folder))
    shape = replace(whole, num_hidden_layers=min(layers or whole.num_hidden_layers, whole.num_hidden_layers))
    with scratch_explained(), TemporaryDirectory(prefix="megalite-verify-") as name:
        scratch = Path(name)
        tokens = None if text else _random_tokens(shape, scratch)
        places = [f"--model.weights={folder}", f"--data.source={text or tokens}"]
        places.append(f"--run.folder={scratch / 'run'}")
        config = _config(shape, run_file, flags, places)
        findings: dict[str, Any] = {"folder": named}
        least = _require_layers(config, whole, shape.num_hidden_layers)
        _require_memory(config, shape, named, least)
        if shape != whole:
            findings |= _changes(config, whole, shape.num_hidden_layers)
            write_first_layers(folder, shape, folder := scratch / "first-layers")
            cut = [f"--model.weights={folder}", f"--model.num_hidden_layers={shape.num_hidden_layers}"]
            config = _config(shape, run_file, flags, [*places, *cut, "--parallel.layers_per_stage=unset"])
        threads = prepare_process(config.training.threads, local_ranks=config.layout.world_size)
        certificate = _certified(config, apart(_inputs, config, folder, tokens), scratch, threads, say)
    findings["seconds"] = time.monotonic() - started
    findings["unchecked"] = [*findings.get("unchecked", ()), *certificate.unchecked]
    return FolderCertificate(**{**vars(certificate), **findings})


def _refuse_run_folder(folder: Path) -> None:
    """Raise CheckpointError for the folder of a run, which has its weights in another place."""
    if (folder / "config.json").exists() or not (folder / "run.toml").exists():
        return
    export = folder / "export"
    remedy, cure = f"write its export first: megalite convert export {folder} {export}", {}
    if (export / "config.json").exists():
        remedy, cure = f"name its export, {export}", {"--from": str(export)}
    raise CheckpointError(
        f"--from: {folder} is a run folder; {remedy}", key="--from", set=cure, value=str(folder)
    )


def _config(
    shape: ModelShape, run_file: Path | None, flags: Sequence[str], places: Sequence[str]
) -> RunConfig:
    """Return the run of one step; the flags of a user stand before those that the comparison needs, and `places`."""
    length = min(_SEQUENCE, shape.max_position_embeddings)
    given = ["--training.micro_batch_size=1", "--training.micro_batches=2"]
    given += [f"--training.sequence_length={length}", "--optimizer.learning_rate=1e-3"]
    plain = [f"--{section}.{key}={value}" for section, keys in _PLAIN.items() for key, value in keys.items()]
    return load_run(run_file, [*([] if run_file else given), *flags, *plain, *places], places=True).config


def _certified(
    config: RunConfig, inputs: "RunInputs", scratch: Path, threads: int, say: Callable[[str], None]
) -> Certificate:
    layout = config.layout
    from megalite.train.run import prepare_deepspeed, require_kernels
    from megalite.verify.record import RecordJob, record_rank
    from megalite.verify.transformers_record import record_transformers

    prepare_deepspeed(config, None)
    require_kernels(config)
    jobs = {}
    for name, run in (("layout", config), ("transformers", alone(config))):
        (scratch / name).mkdir()
        jobs[name] = RecordJob(run, inputs, scratch / name, 1, threads)
    say(f"computing one step with transformers, of {config.batch.global_batch_size} sequences")
    logits = apart(record_transformers, jobs["transformers"])
    say(f"computing it in {layout.text}")
    preload = ["torch", "megalite.verify.record"]
    if layout.world_size == 1:
        [info] = local_rank_infos(1, scratch / "meet")
        apart(record_rank, info, jobs["layout"])
    else:
        start = LocalStart(preload, hangs=config.hang_policy, say=say)
        train_ranks(record_rank, scratch, jobs["layout"], start)
    say("comparing")
    return apart(_judged, jobs["layout"], jobs["transformers"], logits)


def _judged(ours: "RecordJob", theirs: "RecordJob", logits: float) -> Certificate:
    """Compare the records, in a process of its own."""
    import torch

    from megalite.verify.compare import Comparer
    from megalite.verify.measure import FLOAT32_GRADIENT_RTOL, FLOAT32_RTOL
    from megalite.verify.record import EndRecord, StepRecord

    torch.set_num_threads(ours.threads)
    config, layout = ours.config, ours.config.layout
    bounds = {INITIAL: 0.0, LOSS: FLOAT32_RTOL, OUTPUT: FLOAT32_RTOL}
    bounds |= dict.fromkeys((OWN, SUMMED), _GRADIENT_RTOL) | {NORM: FLOAT32_GRADIENT_RTOL}

    def read(rank: int, step: int) -> StepRecord:
        record = StepRecord.read(ours.step_file(rank, step))
        return replace(record, pieces=[each for each in record.pieces if each.quantity in bounds], outputs={})

    def read_theirs(step: int) -> StepRecord:
        return StepRecord.read(theirs.step_file(0, step))

    comparison = Comparer(read, read_theirs, layout.world_size, bounds, torch.float32).compare(1)
    comparison.worst["logits"] = Worst(logits, FLOAT32_RTOL, "logits", 1, 1)
    same_weights = all(each.step for each in comparison.departures)
    if same_weights and not logits <= FLOAT32_RTOL:
        comparison.departures.insert(0, Departure(1, OUTPUT, "logits", (), logits, FLOAT32_RTOL))
    end = EndRecord(**torch.load(ours.end_file(0), weights_only=True))
    return Certificate(
        config_sha256=config_sha256(config),
        layout=layout.text,
        axes=layout.sizes,
        ranks=[layout.describe(rank) for rank in range(layout.world_size)],
        steps=1,
        precision="fp32",
        full_size=True,
        bounds=bounds,
        worst=worst_of(comparison),
        departures=comparison.departures,
        copies=end.copies,
        documents=0,
        leaks=(),
        changed=(),
        unchecked=[*_unchecked(config)],
        operators=end.operators,
        kernels=end.kernels,
        device=end.device,
        versions={**versions(), "transformers": version("transformers")},
    )


def _unchecked(config: RunConfig) -> Iterator[str]:
    """Yield what the certificate says nothing about."""
    length, window = config.training.sequence_length, config.model.sliding_window
    yield f"sequences of more than {length} tokens" + (f", where windows of {window} begin" if window else "")
    yield "numbers other than float32; updates, for which transformers has no optimizer"
    if config.layout.world_size > 1:
        yield "logits in this layout: those of one process were compared, and the layout's loss and gradients"
    yield "dropout, documents that share a row, and loss terms beside the cross entropy"


def _inputs(config: RunConfig, folder: Path, tokens: Path | None) -> "RunInputs":
    """Return the samples and weights. tokens: prefix of a token file, for which a folder needs no tokenizer."""
    from megalite.data.ensure import RunData, ensure_data
    from megalite.train.inputs import RunInputs

    if tokens is not None:
        return RunInputs(RunData(None, (tokens,), (1.0,)), str(folder))
    return RunInputs(
        ensure_data(config, Path(config.run.folder), PreparationConsole(StringIO())), str(folder)
    )


def _random_tokens(shape: ModelShape, scratch: Path) -> Path:
    """Write a token file of random ids of the whole vocabulary; return its prefix."""
    draw, prefix = np.random.default_rng(0), scratch / "random"
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(
            bin_file, idx_file, np.dtype(np.uint16 if shape.vocab_size <= 1 << 16 else np.int32)
        )
        writer.add(draw.integers(0, shape.vocab_size, _TOKENS))
        writer.end_document()
        writer.finish()
        writer.close()
    return prefix


def _require_layers(config: RunConfig, whole: ModelShape, layers: int) -> int:
    """Return how many first layers the run's layout and its experts need; raise ConfigError for fewer."""
    chunks = len(config.split.layers)
    experts = next((layer + 1 for layer in range(whole.num_hidden_layers) if whole.has_experts(layer)), 1)
    least, rule = chunks, f"{layers} is less than the {chunks} chunks of {config.layout.text}"
    if experts > chunks:
        least, rule = experts, f"{layers} leaves no layer with experts: the first {experts - 1} have none"
    if layers < least:
        raise ConfigError([Problem.reset("--layers", rule, f"use {least} or more", least)], COMMAND_LINE)
    return least


def _require_memory(config: RunConfig, shape: ModelShape, named: str, least: int) -> None:
    """Raise CheckpointError where this machine has too little memory free; least: layers that can be compared."""
    needed, free = _bytes_needed(config, shape), available_memory_bytes()
    if free is None or needed <= free:
        return
    layers, cure = shape.num_hidden_layers, {}
    smaller = range(least, layers)
    fitting = bisect_right(
        smaller, free, key=lambda fewer: _bytes_needed(config, replace(shape, num_hidden_layers=fewer))
    )
    remedy = "use a machine with more memory, or a smaller model of the same family"
    if fitting:
        fewer = smaller[fitting - 1]
        remedy = f"compare its first layers alone with --layers {fewer}, or {remedy}"
        cure = {"--layers": fewer}
    raise CheckpointError(
        f"{layers} layers of {named} have {parameter_count(shape):,} parameters: comparing their gradients takes about"
        f" {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; {remedy}",
        key="--layers",
        set=cure,
    )


def _bytes_needed(config: RunConfig, shape: ModelShape) -> int:
    """Return the memory of a comparison, in which several ranks may hold the same part of the model."""
    layout, parameters = config.layout, list(model_parameters(shape))
    copies = {"etp": layout.expert_sizes["edp"]}
    numbers = sum(each.numel * copies.get(each.spec.axis, layout.copies) for each in parameters)
    largest = max(each.numel for each in parameters)
    bytes_of_torch = layout.world_size * _BYTES_OF_TORCH
    return numbers * _BYTES_A_PARAMETER + largest * _BYTES_OF_THE_LARGEST + bytes_of_torch


def _changes(config: RunConfig, whole: ModelShape, layers: int) -> dict[str, Any]:
    """Return what a certificate of the first layers says of the whole."""
    kinds = [
        (whole.window_of(layer) is None, whole.rotates(layer), whole.has_experts(layer))
        for layer in range(whole.num_hidden_layers)
    ]
    every = max(map(kinds.index, kinds)) + 1
    left_out = f"the last {len(kinds) - layers} of {len(kinds)} layers"
    if every > layers:
        left_out += f", with kinds of layers that the first {layers} lack: --layers {every} has one of each"
    changed = [f"model.num_hidden_layers: {len(kinds)} -> {layers}"]
    if (stages := config.parallel.layers_per_stage) is not None:
        changed.append(f"parallel.layers_per_stage: {list(stages)} -> unset")
    return {"full_size": False, "changed": changed, "unchecked": [left_out]}
