"""The settings of [training]: length and batch, number types, and how a step is computed."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Annotated, Literal

from pydantic import Field

from megalite.config.sections.section import Count, Fraction, Lenient, Section, Text

RecomputeMode = Literal["none", "selective", "full"]

LEAST_MICRO_BATCH = {"text": 1, "instruct": 1, "preference": 2}
"""data.kind -> the fewest rows of a micro batch: both answers of a pair are in one."""


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size * micro_batches * data, in sequences."""

    micro_batch_size: int
    micro_batches: int
    global_batch_size: int
    data: int

    @classmethod
    def of_size(cls, size: int, total: int, data: int) -> "BatchPlan":
        """Return the plan with micro batches of `size` sequences in a global batch of `total`."""
        return cls(size, total // (size * data), total, data)


class _LengthSettings(Section):
    steps: Count | None = Field(None, description="number of optimizer steps; set this or epochs")
    epochs: float | None = Field(None, gt=0, description="passes over the data; set this or steps")
    stop_after: float | Text | None = Field(
        None,
        description='time that a start has until it saves and stops, as in "23h30m" or in seconds',
    )
    sequence_length: Count = Field(description="tokens per sequence")
    micro_batch_size: Count | Literal["auto"] | None = Field(
        None, description='sequences per forward of one replica; "auto": the most that fit the memory'
    )
    micro_batches: Count | None = Field(
        None, description="micro batches per step and replica (gradient accumulation steps)"
    )
    global_batch_size: Count | None = Field(None, description="sequences per step over all replicas")
    memory_limit: float | None = Field(
        None,
        gt=0,
        description='GiB that a rank may fill, with micro_batch_size = "auto"; default: what is free',
    )


class PrecisionSettings(Section):
    """Number types, the loss scale, and the reaction to a gradient that is not finite and to a spike of the loss."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = Field(
        "auto",
        description='number type; "auto": that of DeepSpeed\'s JSON or the checkpoint, else bf16 if fast',
    )
    tf32: bool = Field(
        False,
        description="fp32 on NVIDIA cards: matrix products on tensor cores, with 10 bits of mantissa",
    )
    accumulation: Literal["fp32", "model"] = Field(
        "fp32", description='number type of accumulated gradients; "model": the type of the weights'
    )
    loss_scale: Annotated[float, Field(gt=0)] | Literal["dynamic"] = Field(
        "dynamic", description='fp16: factor on the loss; a number is a static scale, "dynamic" adapts it'
    )
    initial_loss_scale_power: int = Field(
        16, ge=0, le=64, description="fp16: the dynamic loss scale starts at 2 to this power"
    )
    loss_scale_window: Count = Field(
        1000, description="fp16: steps without overflow after which the loss scale doubles"
    )
    loss_scale_hysteresis: Count = Field(
        1, description="fp16: number of overflows after which the loss scale halves"
    )
    minimum_loss_scale: Count = Field(1, description="fp16: an overflow at this loss scale ends the run")
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description='inf or nan gradient: "stop", "skip" the step or "rollback" to the last checkpoint',
    )
    nonfinite_limit: Count = Field(10, description="consecutive skipped steps that end the run")
    loss_spike: Literal["report", "stop", "skip", "rollback"] = Field(
        "report",
        description='loss far above its median: "report", "stop", "skip" or "rollback", as nonfinite',
    )
    spike_window: Count = Field(100, description="steps whose losses a loss is compared with")
    spike_deviations: float = Field(
        8.0, gt=0, description="median absolute deviations from the median beyond which a loss is a spike"
    )
    rollback_limit: Count = Field(
        3, description="rollbacks that end the run when each is within spike_window steps of the last one"
    )


@lru_cache(maxsize=1024)
def _recompute_modes(
    mode: RecomputeMode, first: int | None, ratio: float | None, layers: int
) -> tuple[RecomputeMode, ...]:
    places = range(layers)
    chosen = set(places if first is None else places[:first])
    if ratio is not None:
        # As many as the ratio gives, rounded up, spread evenly.
        number = ceil(ratio * layers - 1e-9)
        chosen &= {place for place in places if (place + 1) * number // layers > place * number // layers}
    return tuple(mode if place in chosen else "none" for place in places)


class ComputeSettings(Section):
    """How a step is computed: recomputation, compilation, terms of the loss."""

    empty_cache_every: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="steps after which unused memory of the accelerator is given back; 0: never",
    )
    recompute: RecomputeMode = Field(
        "none",
        description='activation recomputation: "selective": attention core, "full": decoder layers',
    )
    recompute_layers: Count | None = Field(
        None, description="recompute only the first N layers of each chunk; default: all"
    )
    recompute_ratio: float | None = Field(
        None,
        gt=0,
        le=1,
        description="fraction of each chunk's layers to recompute, evenly spread, rounded up",
    )
    sequence_chunk: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="maximum number of tokens whose MLP and loss are computed at once; 0: no limit",
    )
    offload_activations: bool = Field(
        False,
        description="keep saved tensors of an accelerator's layers in host memory; fetched ahead",
    )
    compile: bool = Field(
        False, description="compile each decoder layer with torch.compile; needs a C++ compiler"
    )
    label_smoothing: Fraction = Field(
        0.0,
        description="label smoothing of the training loss; validation has none",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="weight of the squared log-sum-exp in the training loss; validation has none",
    )
    router_balance: float = Field(
        0.0,
        ge=0,
        description="weight of a loss on unequal use of a layer's experts, of each sequence alone",
    )
    router_z: float = Field(0.0, ge=0, description="weight of the squared log-sum-exp of the router's logits")
    router_bias_rate: float = Field(
        0.0, ge=0, description="change of the correction bias of an expert with fewer tokens than others"
    )

    def recompute_of(self, place: int, layers: int) -> RecomputeMode:
        """Return what backward recomputes of layer number `place` of a chunk with `layers` layers."""
        return self.recompute_modes(layers)[place]

    def recompute_modes(self, layers: int) -> tuple[RecomputeMode, ...]:
        """Return what backward recomputes of each layer of a chunk with `layers` layers."""
        return _recompute_modes(self.recompute, self.recompute_layers, self.recompute_ratio, layers)


class TrainingConfig(ComputeSettings, PrecisionSettings, _LengthSettings):
    """Length of the run, batch, precision, activation recomputation and loss.

    global_batch_size = micro_batch_size * micro_batches * parallel.data; set two of the first three.
    """

    threads: Count | Literal["auto"] = Field(
        "auto", description='CPU threads per rank; "auto": the machine\'s cores divided by its ranks'
    )
    callbacks: Annotated[tuple[Text, ...], Lenient] = Field(
        (), description='callbacks of your own as MODULE:CLASS, as in ["my_hooks:WeightNorm"]'
    )
