"""The memory of a rank on its accelerator, and the settings that lower it: for when memory runs out. No torch."""

from collections.abc import Iterator

from megalite.config.sections.derived import offload_devices
from megalite.config.sections.schema import RunConfig
from megalite.planner.memory import RankMemory, kinds_text, memory_of_stages
from megalite.topology.experts import MixtureShape
from megalite.topology.optimizers import OPTIMIZERS
from megalite.topology.sharding import divisors, tensor_sizes

_ZERO = "deepspeed.zero_optimization"
_CHUNK = 256
"""Tokens whose logits `model.chunked_loss` is advised to compute at a time."""
_SEQUENCE_CHUNK = 1024
"""Tokens whose MLP `training.sequence_chunk` is advised to compute at a time: enough for fast products."""


def out_of_memory_lines(config: RunConfig, vocab_size: int, stage: int, total: float) -> list[str]:
    """Return the lines on the memory of a rank of pipeline stage `stage`, and how to lower it.

    config: a run whose precision is known. total: the bytes of the card; inf: unknown. The settings of what takes more
    of the card come first.
    """
    memory = list(memory_of_stages(config, vocab_size))[stage]
    states = [f"for weights, gradients and optimizer state: {_joined(state_remedies(config))}"]
    activations = [f"for activations and logits: {_joined(activation_remedies(config))}"]
    lines = [*states, *activations] if memory.states > total / 2 else [*activations, *states]
    return [_kinds(config, memory, total), *lines]


def activation_remedies(config: RunConfig) -> Iterator[str]:
    """Yield the flags that lower the memory of a micro batch, in the order of their cost.

    Sequence parallelism sends as much as before, smaller micro batches make smaller products, chunks compute the head
    1.08 times as long, full recomputation costs one more forward, chunks of the MLP one more of the MLP, offload waits
    for the host where the link is slow, and shorter sequences are another training.
    """
    training = config.training
    tokens = config.batch.micro_batch_size * training.sequence_length // config.layout.context
    size, count = config.batch.micro_batch_size, config.batch.micro_batches
    if config.layout.tensor > 1 and not config.parallel.sequence:
        yield "--parallel.sequence true"
    if size > 1:
        smaller = divisors(size)[-2]
        # The global batch stays as it is.
        batch = f"--training.micro_batch_size {smaller} --training.micro_batches {count * size // smaller}"
        yield batch
    on_pairs = _trains_head_on_pairs(config)
    if (config.model.chunked_loss or tokens) > _CHUNK and not on_pairs:
        yield f"--model.chunked_loss {_CHUNK}"
    if training.recompute != "full":
        yield "--training.recompute full"
    elif training.recompute_layers is not None:
        yield "--training.recompute_layers unset"
    elif training.recompute_ratio is not None:
        yield "--training.recompute_ratio unset"
    refused = training.compile or on_pairs or config.model.num_experts
    if (training.sequence_chunk or tokens) > _SEQUENCE_CHUNK and not refused:
        yield f"--training.sequence_chunk {_SEQUENCE_CHUNK}"
    if not (training.offload_activations or training.compile):
        yield "--training.offload_activations true"
    if training.sequence_length > 1:
        yield f"--training.sequence_length {training.sequence_length // 2}"


def state_remedies(config: RunConfig) -> Iterator[str]:
    """Yield the flags that lower weights, gradients and optimizer state of a rank, in the order of their cost.

    A ZeRO stage sends more, offload waits for the host, an adapter trains less, and the last ones need more cards.
    """
    layout, model, stage = config.layout, config.model, config.zero_stage
    if more := _more_expert_ranks(config):
        yield f"--parallel.expert {more}"
    if layout.data > 1 and stage < _highest_zero_stage(config):
        yield f"--{_ZERO}.stage {stage + 1}"
    zero = config.deepspeed_json()["zero_optimization"] if stage else {}
    if stage and "offload_optimizer" not in offload_devices(zero):
        yield f"--{_ZERO}.offload_optimizer.device cpu"
    if config.adapter.kind == "none" and model.weights is not None and not (stage and layout.pipeline > 1):
        yield "--adapter.kind lora"
    sizes = tensor_sizes(model.num_attention_heads, model.num_key_value_heads or model.num_attention_heads)
    wider = next((size for size in sizes if size > layout.tensor), 0)
    shared = model.num_experts and (layout.expert_tensor or 0) > 1
    if wider and not (config.training.compile or shared) and stage < 3:
        yield f"--parallel.tensor {wider}"
    stages = 2 * layout.pipeline
    enough = config.batch.micro_batches >= stages <= model.num_hidden_layers // config.split.chunks_per_stage
    if enough and stage < 2:
        yield f"--parallel.pipeline {stages}"


def _highest_zero_stage(config: RunConfig) -> int:
    """Return the highest ZeRO stage that the rules allow; 0: none."""
    optimizer, layout, pipeline = config.optimizer, config.layout, config.layout.pipeline
    unequal = bool(optimizer.groups) or config.adapter.kind != "none"
    if OPTIMIZERS[optimizer.name].whole_matrices or optimizer.clip_value or (unequal and pipeline > 1):
        return 0
    if pipeline > 1:
        return 1
    if config.model.num_experts % layout.expert:
        return 1  # its buckets need equally many experts on each rank
    shared_heads = config.layout.tensor > (config.model.num_key_value_heads or config.layout.tensor)
    shape = config.model.shape(1)
    corrected = (
        isinstance(shape, MixtureShape) and shape.experts is not None and shape.experts.correction_bias
    )
    whole = config.training.compile or optimizer.ema_decay or corrected
    return 2 if whole or shared_heads else 3


def _more_expert_ranks(config: RunConfig) -> int:
    """Return the next number of ranks among which the experts could be divided; 0: none."""
    layout, number = config.layout, config.model.num_experts
    sizes = divisors(layout.expert_sizes["edp"] * layout.expert) if number else []
    equal = config.zero_stage >= 2
    fitting = (size for size in sizes if size <= number and not (equal and number % size))
    return next((size for size in fitting if size > layout.expert), 0)


def _kinds(config: RunConfig, memory: RankMemory, total: float) -> str:
    text = kinds_text(memory, config.optimizer.name, largest_first=True)
    if memory.peak > total:
        return f"this rank needs by estimate: {text}, which are more than the card has"
    return f"this rank needs by estimate: {text}"


def _trains_head_on_pairs(config: RunConfig) -> bool:
    """Return whether the rules refuse chunks of the loss: preferences whose head is trained."""
    frozen = config.adapter.kind != "none" and not config.adapter.modules_to_save
    return config.data.kind == "preference" and not frozen


def _joined(remedies: Iterator[str]) -> str:
    return ", or ".join(remedies) or "use a smaller model"
