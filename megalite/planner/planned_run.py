"""PlannedRun: the settings of a run that its memory and its time depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

from megalite.config.sections.derived import offload_devices
from megalite.config.sections.schema import ModelComputeSettings, OptimizerConfig, RunConfig
from megalite.config.sections.training_section import ComputeSettings
from megalite.launcher.process import available_cores
from megalite.topology.axes import ROLES, Layout
from megalite.topology.context import ContextMethod
from megalite.topology.dtypes import PRECISIONS
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit


@dataclass(frozen=True)
class PlannedRun:
    """A resolved run with a known vocabulary and precision.

    model, training, optimizer: the sections of these names, of which only settings of computation are read.
    sequence_parallel: `parallel.sequence`. context_method: `parallel.context_method` of a run whose sequences are cut.
    offload: table of `zero_optimization` -> "cpu" or "nvme".
    zero: `zero_optimization` of DeepSpeed's JSON.
    plain_torch: plain torch computes what has a compiled operator. on_cpu: it computes on the host. threads: of a rank.
    """

    shape: ModelShape
    layout: Layout
    split: PipelineSplit
    schedule: str
    micro_batch_size: int
    micro_batches: int
    sequence_length: int
    precision: str
    accumulation: Literal["fp32", "model"] = "fp32"
    sequence_parallel: bool = False
    zero_stage: int = 0
    offload: Mapping[str, str] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    model: ModelComputeSettings = field(default_factory=ModelComputeSettings)
    training: ComputeSettings = field(default_factory=ComputeSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    plain_torch: bool = False
    on_cpu: bool = False
    context_method: ContextMethod = "gather"
    threads: int = 1

    @classmethod
    def of(
        cls, config: RunConfig, vocab_size: int, *, on_cpu: bool = False, plain_torch: bool = False
    ) -> "PlannedRun":
        """Return the plan of a resolved run whose precision is known."""
        parallel, training, batch = config.parallel, config.training, config.batch
        shared = max(1, available_cores() // config.layout.world_size)  # as if all ranks were on this machine
        zero = dict(config.deepspeed_json()["zero_optimization"]) if config.zero_stage else {}
        return cls(
            config.shape(vocab_size),
            config.layout,
            config.split,
            parallel.schedule,
            batch.micro_batch_size,
            batch.micro_batches,
            training.sequence_length,
            training.precision,
            training.accumulation,
            parallel.sequence,
            config.zero_stage,
            offload_devices(zero),
            zero,
            config.model,
            training,
            config.optimizer,
            plain_torch,
            on_cpu,
            context_method="gather" if parallel.context_method == "auto" else parallel.context_method,
            threads=shared if training.threads == "auto" else training.threads,
        )

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return PRECISIONS[self.precision].size_bytes

    @cached_property
    def exact_bytes(self) -> int:
        """Bytes of a master weight, a moment or a statistic: at least those of float32."""
        return max(4, self.weight_bytes)

    @cached_property
    def gradient_bytes(self) -> int:
        return self.exact_bytes if self.accumulation == "fp32" else self.weight_bytes

    @cached_property
    def sums_in_place(self) -> bool:
        """Whether backward adds to the sums of gradients itself, which autograd does elsewhere."""
        return not (self.zero_stage or self.plain_torch) and self.accumulation == "fp32"

    @cached_property
    def offloads_activations(self) -> bool:
        """Whether the layers of an accelerator keep their activations on the host."""
        return self.training.offload_activations and not self.on_cpu

    @cached_property
    def copies(self) -> int:
        """The number of ranks with the same dense weights, over which ZeRO partitions."""
        return prod(self.layout.sizes[axis] for axis in ROLES["dense_gradients"])

    @cached_property
    def expert_copies(self) -> int:
        """The number of ranks with the same experts."""
        return self.layout.expert_sizes["edp"]

    @cached_property
    def cut_of_experts(self) -> int:
        """The ranks that share each expert."""
        return self.layout.expert_sizes["etp"]

    @property
    def tokens(self) -> int:
        """The tokens of a micro batch on a rank: its share of the sequences."""
        return self.micro_batch_size * self.sequence_length // self.layout.context

    @property
    def chunk_tokens(self) -> int:
        """The tokens of a micro batch whose MLP is computed at once."""
        return min(self.tokens, self.training.sequence_chunk or self.tokens)

    @property
    def positions(self) -> float:
        """The tokens of a micro batch whose hidden states a rank keeps: a share of them with sequence parallelism."""
        return self.tokens / (self.layout.tensor if self.sequence_parallel else 1)
