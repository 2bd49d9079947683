"""The training step that all benchmarks share: a 17M Llama, AdamW, clipping; batch 4 x 256, float32 by default."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megalite.config.sections.schema import OptimizerConfig
from megalite.data.batches.transfer import BatchTransfer
from megalite.model.options import PLAIN, ModelOptions
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import weight_share
from megalite.parallel.step_batch import StepBatch
from megalite.topology.axes import Layout
from megalite.topology.balance import balanced_layers
from megalite.topology.context import ContextMethod
from megalite.topology.flops import forward_flops
from megalite.topology.schedules import SCHEDULES
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.train.assemble import StepSchedule, TrainingPlan, assemble
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.step.step_totals import total_over_ranks

SEQUENCES, SEQUENCE_LENGTH = 4, 256
TOKENS = SEQUENCES * SEQUENCE_LENGTH
SHAPE = ModelShape(
    vocab_size=16384,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=6,
    head_dim=64,
    max_position_embeddings=SEQUENCE_LENGTH,
    tie_word_embeddings=True,
)
SETTINGS = OptimizerSettings(OptimizerConfig(name="adamw"))
WARM_UP_STEPS, TIMED_STEPS = 3, 8


def token_ids(sequences: int = SEQUENCES, length: int = SEQUENCE_LENGTH) -> torch.Tensor:
    return torch.randint(SHAPE.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Setup:
    """One way to train the step. zero: DeepSpeed's `zero_optimization`, or None for the torch optimizer.

    shape: the model's; its `max_position_embeddings` are the tokens of a sequence.
    """

    layout: Layout = field(default_factory=Layout)
    schedule: str = "1f1b"
    micro_batches: int = 1
    options: ModelOptions = PLAIN
    zero: Mapping[str, Any] | None = None
    sequences: int = SEQUENCES
    sequence_parallel: bool = False
    document_tokens: int | None = None  # on average; None: no documents are told apart
    balanced: bool = False  # layers spread by their work, the head's included
    shape: ModelShape = SHAPE
    context_method: ContextMethod = "gather"

    @property
    def length(self) -> int:
        """The tokens of a sequence."""
        return self.shape.max_position_embeddings

    def mesh(self) -> ParallelMesh:
        """Over the ranks of the default process group."""
        return ParallelMesh.over_world(
            self.layout, sequence_parallel=self.sequence_parallel, context_method=self.context_method
        )


class Training:
    """A setup's objects on one rank, and its step."""

    def __init__(self, setup: Setup, mesh: ParallelMesh):
        schedule = SCHEDULES[setup.schedule]
        split = pipeline_split(
            setup.shape.num_hidden_layers,
            mesh.layout.pipeline,
            chunks_per_stage=schedule.default_chunks,
            v_shaped=schedule.v_shaped,
            layers_per_chunk=_balanced_layers(setup) if setup.balanced else None,
        )
        plan = TrainingPlan(
            setup.shape,
            split,
            setup.options,
            SETTINGS,
            StepSchedule(setup.schedule, setup.micro_batches),
            deepspeed=None if setup.zero is None else _deepspeed_json(setup, setup.zero, mesh),
        )
        self.replica, self.optimizer, self.pipeline = assemble(plan, mesh, seed=0)
        self.batch = _batch(setup, mesh)
        if setup.document_tokens is not None:
            self.batch = _in_documents(self.batch, setup.document_tokens)
        self.batch = BatchTransfer(mesh.device).start(self.batch).ready()
        self._weight = mesh.reduce_over_world(weight_share(self.batch, mesh))

    def step(self) -> float:
        """The loss."""
        weight = self._weight
        loss = self.pipeline.forward_backward(self.batch, weight, self.optimizer.loss_scale)
        self.optimizer.reduce_gradients()
        squared_norm = self.optimizer.squared_norm()
        mesh = self.replica.mesh
        totals = total_over_ranks(
            mesh, loss, squared_norm, weight_share(self.batch, mesh), (), loss.new_empty(0)
        )
        self._weight = totals.next_weight
        self.optimizer.step(3e-4, totals.squared_norm)
        return totals.loss


def _balanced_layers(setup: Setup) -> tuple[int, ...]:
    schedule, flops = SCHEDULES[setup.schedule], forward_flops(setup.shape, setup.length)
    return balanced_layers(
        flops.layers,
        flops.head,
        setup.layout.pipeline,
        chunks_per_stage=schedule.default_chunks,
        v_shaped=schedule.v_shaped,
    )


def _deepspeed_json(setup: Setup, zero: Mapping[str, Any], mesh: ParallelMesh) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": setup.sequences // mesh.batch.size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": SETTINGS.optimizer.gradient_clipping,
        "zero_optimization": dict(zero),
        "bf16": {"enabled": setup.options.dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }


def _batch(setup: Setup, mesh: ParallelMesh) -> StepBatch:
    """This rank's share of the batch, of whole sequences."""
    count = setup.sequences // mesh.batch.size
    mine = slice(mesh.batch.rank * count, (mesh.batch.rank + 1) * count)
    input_ids = token_ids(setup.sequences, setup.length)[mine]
    positions = torch.arange(setup.length).repeat(count, 1)
    labels, mask = input_ids.roll(-1, dims=1), torch.ones(input_ids.shape)
    return StepBatch(input_ids, positions, labels, mask, torch.arange(setup.sequences)[mine])


def _in_documents(batch: StepBatch, tokens: int) -> StepBatch:
    """Rows that are cut at random, by the same generator on every rank."""
    cut = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(1)) < 1 / tokens
    cut[:, 0] = False
    places = torch.arange(cut.shape[1]).expand_as(cut)
    first = places.masked_fill(~cut, 0).cummax(dim=1).values
    return replace(batch, position_ids=places - first, document_ids=cut.cumsum(dim=1))


def transformers_step() -> Callable[[], float]:
    """The same step as its users write it: the model's own loss, torch's clipping and AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE.vocab_size,
            hidden_size=SHAPE.hidden_size,
            intermediate_size=SHAPE.intermediate_size,
            num_hidden_layers=SHAPE.num_hidden_layers,
            num_attention_heads=SHAPE.num_attention_heads,
            num_key_value_heads=SHAPE.num_key_value_heads,
            max_position_embeddings=SEQUENCE_LENGTH,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    input_ids = token_ids()

    def step() -> float:
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def step_seconds(step: Callable[[], float]) -> list[float]:
    """Seconds of each timed step, after the warm-up."""
    seconds = []
    for index in range(WARM_UP_STEPS + TIMED_STEPS):
        started = time.perf_counter()
        step()
        if index >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - started)
    return seconds
