"""Rules and notes on how a step is computed: dropout, recompute, torch.compile, sequence parallelism, offload."""

from collections.abc import Iterator

from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.derived import offload_devices
from megalite.config.sections.shape_settings import model_shape
from megalite.errors import Problem
from megalite.topology.schedules import SCHEDULES


def recomputed_layers_are_chosen_once(run: CheckedRun) -> Iterator[Problem]:
    layers, ratio = run.training.recompute_layers, run.training.recompute_ratio
    if layers is not None and ratio is not None:
        message = f"{layers} and training.recompute_ratio = {ratio} are both set"
        yield Problem(
            "training.recompute_layers", message, "set only one of them", {"training.recompute_ratio": None}
        )


def chosen_layers_are_recomputed(run: CheckedRun) -> Iterator[Problem]:
    if run.training.recompute != "none":
        return
    for name in ("recompute_layers", "recompute_ratio"):
        value = getattr(run.training, name)
        if value is not None:
            message = f'{value} has no effect with training.recompute = "none"'
            yield Problem(
                f"training.{name}",
                message,
                'set training.recompute to "full" or "selective"',
                {"training.recompute": "full"},
            )


def compiled_layers_fit_the_schedule(run: CheckedRun) -> Iterator[Problem]:
    if not run.training.compile or run.parallel.pipeline == 1:
        return
    name = run.parallel.schedule
    if SCHEDULES[name].splits_backward:
        others = ", ".join(f'"{each}"' for each in SCHEDULES if not SCHEDULES[each].splits_backward)
        message = (
            f'true does not work with parallel.schedule = "{name}", which computes input and weight gradients '
            "separately: a compiled layer computes them together"
        )
        remedy = f"use one of the schedules {others}, or training.compile = false"
        yield Problem.reset("training.compile", message, remedy, False)


def compiled_layers_hold_no_collectives(run: CheckedRun) -> Iterator[Problem]:
    for axis, size in (("tensor", run.parallel.tensor), ("context", run.parallel.context)):
        if run.training.compile and size > 1:
            message = f"true does not work with parallel.{axis} = {size}: collectives are not compiled"
            remedy = f"use parallel.{axis} 1, or training.compile = false"
            yield Problem.reset("training.compile", message, remedy, False)


def compiled_layers_are_recomputed_whole(run: CheckedRun) -> Iterator[Problem]:
    if run.training.compile and run.training.recompute == "selective":
        message = (
            'true does not work with training.recompute = "selective": the attention of a compiled layer cannot be '
            "recomputed alone"
        )
        remedy = 'use training.recompute "full" or "none", or training.compile = false'
        yield Problem.reset("training.compile", message, remedy, False)


def compiled_layers_hold_their_weights(run: CheckedRun) -> Iterator[Problem]:
    if run.training.compile and run.zero_stage == 3:
        message = "true does not work with deepspeed.zero_optimization.stage = 3, which gathers weights inside a layer"
        yield Problem.reset(
            "training.compile", message, "use stage 1 or 2, or training.compile = false", False
        )


def compiled_layers_hold_their_mlp(run: CheckedRun) -> Iterator[Problem]:
    chunk = run.training.sequence_chunk
    if run.training.compile and chunk:
        message = (
            f"{chunk} does not work with training.compile = true: a compiled layer computes the MLP of all tokens at "
            "once"
        )
        remedy = f"set training.compile = false, or model.chunked_loss = {chunk} for the loss alone"
        yield Problem.reset("training.sequence_chunk", message, remedy)


def compiled_layers_keep_their_activations(run: CheckedRun) -> Iterator[Problem]:
    if run.training.compile and run.training.offload_activations:
        message = (
            "true does not work with training.compile = true: compiled backwards write over saved tensors"
        )
        yield Problem.reset(
            "training.offload_activations", message, "set it or training.compile to false", False
        )


def sinks_are_computed_by_blocks(run: CheckedRun) -> Iterator[Problem]:
    if not model_shape(run.model, 1).attention_sinks:
        return
    if run.training.compile:
        message = (
            "true does not work with model.attention_sinks = true: torch.compile cannot trace their attention"
        )
        yield Problem.reset("training.compile", message, "use training.compile = false", False)
    if run.adapter.kind == "prefix":
        message = (
            '"prefix" does not work with model.attention_sinks = true: the virtual tokens have no place there'
        )
        yield Problem.reset("adapter.kind", message, 'use "lora"', "lora")


def attention_dropout_costs(run: CheckedRun) -> Iterator[str]:
    rate, reference = run.model.attention_dropout, run.model.kernels == "reference"
    if rate > 0 and (reference or run.training.compile):
        why = 'model.kernels = "reference"' if reference else "training.compile = true"
        yield (
            f"model.attention_dropout = {rate} with {why} disables fused attention: attention is 3 to 5 times slower "
            "(measured on a CPU, sequences of 256 to 2048) and stores two values per head and pair of tokens"
        )


def soft_caps_cost(run: CheckedRun) -> Iterator[str]:
    cap = run.model.attn_logit_softcapping
    if cap is not None:
        kept = (
            "" if run.training.recompute != "none" else ', unless training.recompute is "selective" or "full"'
        )
        yield (
            f"model.attn_logit_softcapping = {cap} disables fused attention, which has no soft caps: attention is 2 to "
            "7 times slower (measured on a CPU, sequences of 256 to 2048, more with a window)"
            + (kept and f" and stores two values per head and pair of tokens{kept}")
        )


def sequence_parallel_divides_the_length(run: CheckedRun) -> Iterator[Problem]:
    length, tensor = run.training.sequence_length, run.parallel.tensor
    if run.parallel.sequence and run.parallel.context == 1 and length % tensor:
        message = (
            f"{length} is not divisible by parallel.tensor = {tensor}, as parallel.sequence = true requires"
        )
        nearest = [each for each in (length // tensor * tensor, -(-length // tensor) * tensor) if each]
        remedy = f"use {' or '.join(map(str, nearest))}, or parallel.sequence = false"
        yield Problem.reset("training.sequence_length", message, remedy, nearest[0])


def offload_has_its_stage(run: CheckedRun) -> Iterator[Problem]:
    stage = run.zero_stage
    least = {"offload_optimizer": (1, "optimizer state"), "offload_param": (3, "weights")}
    for name, device in _offload_devices(run):
        first, what = least[name]
        if stage < first:
            message = f'device "{device}" has no effect: ZeRO stage {stage} does not partition the {what}'
            remedy = f'use stage {first}{" or higher" * (first < 3)}, or device "none"'
            key = f"deepspeed.zero_optimization.{name}"
            yield Problem(key, message, remedy, {f"{key}.device": "none"})


def offload_has_a_device(run: CheckedRun) -> Iterator[Problem]:
    for name, device in _offload_devices(run):
        if device not in ("cpu", "nvme"):
            key = f"deepspeed.zero_optimization.{name}.device"
            yield Problem.reset(
                key,
                f'"{device}" is not a device that DeepSpeed offloads to',
                'use "cpu", "nvme" or "none"',
                "none",
            )


def offload_to_disk_has_its_folder(run: CheckedRun) -> Iterator[Problem]:
    for name, device in _offload_devices(run):
        key = f"deepspeed.zero_optimization.{name}"
        table = run.deepspeed["zero_optimization"][name]
        if device != "nvme":
            continue
        if run.zero_stage in (1, 2):
            message = f'"nvme" needs ZeRO stage 3, but the stage is {run.zero_stage}'
            yield Problem.reset(f"{key}.device", message, 'use stage 3, or "cpu"', "cpu")
        elif not isinstance(table.get("nvme_path"), str):
            yield Problem(
                f"{key}.nvme_path", 'is required with device = "nvme"', "set it to a folder on that disk"
            )
        for pipelined in ("pipeline_read", "pipeline_write"):
            if table.get(pipelined):
                message = "is not supported: a checkpoint could read state that is not on the disk yet"
                yield Problem.reset(f"{key}.{pipelined}", message, "set it to false", False)


def _offload_devices(run: CheckedRun) -> Iterator[tuple[str, str]]:
    yield from offload_devices(run.deepspeed.get("zero_optimization", {})).items()


def one_rank_has_the_whole_sequence(run: CheckedRun) -> Iterator[str]:
    if run.parallel.sequence and run.parallel.tensor == 1:
        yield "parallel.sequence = true has no effect with parallel.tensor = 1"


def compiled_documents_cost(run: CheckedRun) -> Iterator[str]:
    masks = run.data.document_mask or run.data.kind != "text"
    if run.training.compile and masks:
        yield (
            "training.compile with documents kept apart computes attention with a dense mask: on a CPU attention is 3 "
            "times slower than without training.compile, where each document is computed alone"
        )


def chunks_are_smaller_than_a_micro_batch(run: CheckedRun) -> Iterator[str]:
    sequences, length = run.training.micro_batch_size, run.training.sequence_length
    settings = {
        "model.chunked_loss": run.model.chunked_loss,
        "training.sequence_chunk": run.training.sequence_chunk,
    }
    for name, chunk in settings.items():
        if isinstance(sequences, int) and chunk >= (tokens := sequences * length // run.parallel.context):
            yield f"{name} = {chunk} saves no memory: a micro batch has only {tokens} tokens on a rank"
