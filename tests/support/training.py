"""A few training steps of a tiny model on one rank of any layout, reported as full canonical tensors."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.sections.schema import OptimizerConfig
from megalite.data.batches.transfer import BatchTransfer
from megalite.model.replica import Replica
from megalite.model.transformer import Stage
from megalite.ops.choice import ALL_COMPILED, PLAIN_TORCH, Operators
from megalite.parallel.device import local_device
from megalite.parallel.gradient_buckets import kept_before_sums
from megalite.parallel.gradients import is_partial
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.objective import NEXT_TOKEN, Objective, Preference
from megalite.parallel.pipeline import PipelineRunner, weight_share
from megalite.parallel.step_batch import EVALUATION, WITHOUT_ADAPTER, StepBatch
from megalite.topology.axes import Layout
from megalite.topology.context import ContextMethod
from megalite.topology.experts import EXPERT_AXIS, MixtureShape
from megalite.topology.parameters import Parameter, canonical_tensors, model_parameters
from megalite.topology.schedules import SCHEDULES
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice
from megalite.topology.stages import pipeline_split
from megalite.train.assemble import StepSchedule, TrainingPlan, assemble
from megalite.train.optimizer.protocol import Optimizer, Update
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.step.reference import is_without_adapter
from megalite.train.step.router_load import RouterLoad
from megalite.verify.record import start_adapter, watch_gradients
from tests.support.options import NO_DROPOUT, NO_RECOMPUTE, Dropout, Recompute, options_of
from tests.support.parity import assert_copies
from tests.support.tiny import SEQUENCE_LENGTH, in_documents, padded, tiny_batch

SEQUENCES = 8
ALONE = Layout()
# SGD, because Adam hides a wrong constant factor; the norms are above 0.5, so clipping is active.
SGD = OptimizerSettings(OptimizerConfig(name="sgd", gradient_clipping=0.5))


@dataclass(frozen=True)
class Job:
    """A training job: the model's shape, the layout and split of the global batch, the optimizer, the dtype."""

    shape: ModelShape
    layout: Layout = ALONE
    layers_per_stage: Sequence[int] | None = None
    micro_batch_size: int = 1
    schedule: str = "1f1b"
    chunks_per_stage: int = 1
    sequence_parallel: bool = False
    context_method: ContextMethod = "gather"
    sequence_length: int = SEQUENCE_LENGTH
    optimizer: OptimizerSettings = SGD
    learning_rate: float = 0.1
    zero_stage: int = 0
    offload: str = "none"  # "optimizer"; "parameters": optimizer and parameters
    disk: str | None = None  # the folder for offloading; None: CPU memory
    deepspeed_keys: Mapping[str, Any] = field(
        default_factory=dict, hash=False
    )  # further keys of DeepSpeed's JSON
    dtype: torch.dtype = torch.float64
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    router_balance: float = 0.0
    router_z: float = 0.0
    router_bias_rate: float = 0.0  # evaluates in each step too, which must not count
    steps: int = 1
    seed: int = 7
    dropout: Dropout = NO_DROPOUT
    recompute: Recompute = NO_RECOMPUTE
    compile: bool = False
    documents: bool = False
    padded: bool = False
    kernels: Literal["fused", "reference"] = "reference"
    chunked_loss: int = 0
    sequence_chunk: int = 0
    offload_activations: bool = False
    objective: Objective = NEXT_TOKEN
    device: str | None = None  # None: the accelerator of the rank if there is one, else the CPU

    @property
    def operators(self) -> Operators:
        return ALL_COMPILED if self.kernels == "fused" else PLAIN_TORCH


@dataclass(frozen=True)
class Shard:
    """A rank's slice of a canonical tensor; partial: its gradient is one term of a sum over tp."""

    name: str
    region: TensorSlice
    values: Tensor
    partial: bool = False


@dataclass
class RankResult:
    """The results of one rank.

    dp_rank: among the ranks with the same dense weights. gradients: of the first step, before clipping and before
    ZeRO's reduction over dp. without_gradient: the parameters without a gradient in a run of the matrix, which must be
    none; `train_on_rank` fails at once instead.
    """

    dp_rank: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Shard] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    initial: list[Shard] = field(default_factory=list)
    final: list[Shard] = field(default_factory=list)
    loads: list[dict[str, float]] = field(default_factory=list)


def train_on_rank(job: Job) -> RankResult:
    """Run the job's steps on this rank of the current process group."""
    parts = build(job)
    mesh, parameters, optimizer = parts.mesh, parts.replica.parameters, parts.optimizer
    tensors, trained = parts.replica.tensors, parts.replica.trained
    load = RouterLoad(parts.replica, job.router_bias_rate)
    with whole_weights(job.zero_stage, tensors):
        result = RankResult(mesh.dense_gradients.rank, initial=shards_of(parameters, tensors, mesh))
    for step, batch in enumerate(batches(job, parts)):
        with kept_before_sums() as before_sums:
            result.losses.append(parts.forward_backward(batch))
        if step == 0:
            own = parts.replica.trained_tensors
            gradients = parts.reduced if job.zero_stage >= 2 else gradients_of(own, before_sums)
            result.gradients = shards_of(trained, gradients, mesh, complete=job.zero_stage >= 2)
            parts.reduced.clear()
        optimizer.reduce_gradients()
        result.norms.append(parts.update(job.learning_rate).grad_norm)
        if job.router_bias_rate:
            parts.pipeline.evaluate(batch)
            totals = mesh.reduce_over_world(load.take_share())
            result.loads.append(load.stepped(totals, SEQUENCES, skipped=False))
    with whole_weights(job.zero_stage, tensors):
        result.final = shards_of(parameters, tensors, mesh)
    return result


@dataclass(frozen=True)
class Parts:
    """The objects of a job on one rank.

    reduced: under ZeRO 2 and 3 the step's gradients so far, which DeepSpeed removes in each backward.
    """

    replica: Replica
    optimizer: Optimizer
    pipeline: PipelineRunner
    reduced: dict[str, Tensor]
    objective: Objective = NEXT_TOKEN

    @property
    def mesh(self) -> ParallelMesh:
        return self.replica.mesh

    @property
    def stage(self) -> Stage:
        return self.replica.stage

    def accumulate(self, batch: StepBatch) -> float:
        """Run forward and backward of a step and reduce its gradients; return the loss."""
        loss = self.forward_backward(batch)
        self.optimizer.reduce_gradients()
        return loss

    def forward_backward(self, batch: StepBatch) -> float:
        """Run forward and backward of a step; return the loss."""
        scale = self.optimizer.loss_scale
        return float(whole_loss(self.pipeline, batch, self.mesh, scale, objective=self.objective))

    def update(self, learning_rate: float) -> Update:
        """Update the weights from the reduced gradients."""
        squared_norm = float(self.mesh.reduce_over_world(self.optimizer.squared_norm()))
        return self.optimizer.step(learning_rate, squared_norm)


def whole_loss(
    pipeline: PipelineRunner,
    batch: StepBatch,
    mesh: ParallelMesh,
    loss_scale: float = 1.0,
    *,
    objective: Objective = NEXT_TOKEN,
) -> Tensor:
    """Run forward and backward of a step; return its loss, a float64 scalar."""
    weight = mesh.reduce_over_world(weight_share(batch, mesh, objective))
    return mesh.reduce_over_world(pipeline.forward_backward(batch, weight, loss_scale))[0]


def build(job: Job) -> Parts:
    """Build the job's objects on this rank of the current process group, with initial weights."""
    device = torch.device(job.device) if job.device else local_device(dist.get_rank(), dist.get_world_size())
    mesh = ParallelMesh.over_world(
        job.layout,
        device,
        sequence_parallel=job.sequence_parallel,
        context_method=job.context_method,
    )
    if job.compile:  # dynamo's recompilation limit counts earlier jobs of this process too
        torch._dynamo.reset()
    options = options_of(
        dtype=job.dtype,
        dropout=job.dropout,
        dropout_seed=13,
        recompute=job.recompute,
        compile=job.compile,
        label_smoothing=job.label_smoothing,
        z_loss=job.z_loss,
        router_balance=job.router_balance,
        router_z=job.router_z,
        operators=job.operators,
        chunked_loss=job.chunked_loss or job.sequence_chunk,
        sequence_chunk=job.sequence_chunk,
        offload_activations=job.offload_activations,
    )
    split = pipeline_split(
        job.shape.num_hidden_layers,
        job.layout.pipeline,
        chunks_per_stage=job.chunks_per_stage,
        v_shaped=SCHEDULES[job.schedule].v_shaped,
        layers_per_chunk=job.layers_per_stage,
    )
    micro_batches = SEQUENCES // job.layout.data // job.micro_batch_size
    reduced: dict[str, Tensor] = {}

    def watch(replica: Replica) -> None:
        if job.zero_stage >= 2:
            # Register before DeepSpeed's own hooks.
            watch_gradients(replica.trained_tensors, reduced)
        start_adapter(replica, job.seed)

    plan = TrainingPlan(
        job.shape,
        split,
        options,
        job.optimizer,
        StepSchedule(job.schedule, micro_batches),
        job.objective,
        deepspeed_json(job, micro_batches) if job.zero_stage else None,
    )
    replica, optimizer, pipeline = assemble(plan, mesh, seed=job.seed, prepare=watch)
    return Parts(replica, optimizer, pipeline, reduced, job.objective)


@contextmanager
def fp16_allowed() -> Iterator[None]:
    """Allow fp16 on the CPU, which DeepSpeed refuses although torch supports it."""
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
        yield


@contextmanager
def whole_weights(zero_stage: int, tensors: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """Gather this rank's shards while they are in use, if ZeRO 3 has partitioned them."""
    if zero_stage < 3:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(tensors.values())):
        yield


def deepspeed_json(job: Job, micro_batches: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": job.zero_stage}
    there = {"device": "cpu"} if job.disk is None else {"device": "nvme", "nvme_path": job.disk}
    if job.offload != "none":
        zero["offload_optimizer"] = there
    if job.offload == "parameters":
        zero["offload_param"] = {**there, "buffer_size": 1 << 20, "max_in_cpu": 0}
    if job.zero_stage == 3:
        # By default ZeRO 3 would not partition such small weights; this threshold excludes only the norms.
        zero["stage3_param_persistence_threshold"] = 100
    for name, value in job.deepspeed_keys.get("zero_optimization", {}).items():
        zero.pop(f"stage3_{name}", None)
        both = isinstance(value, Mapping) and isinstance(zero.get(name), Mapping)
        zero[name] = {**zero[name], **value} if both else value
    further = {key: value for key, value in job.deepspeed_keys.items() if key != "zero_optimization"}
    return further | {
        "train_micro_batch_size_per_gpu": job.micro_batch_size * micro_batches,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job.optimizer.optimizer.gradient_clipping,
        "zero_optimization": zero,
        "bf16": {"enabled": job.dtype == torch.bfloat16},
        "fp16": {"enabled": job.dtype == torch.float16, "initial_scale_power": 16, "hysteresis": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }


def global_batch(job: Job, step: int) -> StepBatch:
    """Return the same SEQUENCES sequences for every layout, with loss masks of very unequal weight."""
    batch = tiny_batch(job.shape, SEQUENCES, sequence_length=job.sequence_length, step=step)
    batch = padded(batch) if job.padded else batch
    batch = in_documents(batch) if job.documents else batch
    if isinstance(job.objective, Preference):
        labels = batch.labels.clone()
        labels[-2:] = -100  # a pair after the end of the data
        batch = replace(batch, labels=labels, loss_mask=(labels >= 0).float())
    return replace(batch, loss_mask=batch.loss_mask.to(job.dtype))


def local_batch(job: Job, mesh: ParallelMesh, step: int) -> StepBatch:
    whole = global_batch(job, step)
    mine = slice(
        mesh.batch.rank * SEQUENCES // mesh.batch.size, (mesh.batch.rank + 1) * SEQUENCES // mesh.batch.size
    )
    return BatchTransfer(mesh.device).start(rows_of(whole, mine)).ready()


def batches(job: Job, parts: Parts) -> Iterator[StepBatch]:
    """Yield this rank's batch of each step, that of preferences with the losses of the reference."""
    plain = (local_batch(job, parts.mesh, step) for step in range(job.steps))
    if not isinstance(job.objective, Preference):
        yield from plain
        return
    off = is_without_adapter(job.shape)
    mode = WITHOUT_ADAPTER if off else EVALUATION
    referenced = (replace(each, reference=parts.pipeline.row_losses(each, mode)) for each in plain)
    # Otherwise the model is the reference only before its first step.
    yield from referenced if off else list(referenced)


def rows_of(batch: StepBatch, rows: slice) -> StepBatch:
    return batch.map(lambda tensor: tensor[rows])


def gradients_of(
    tensors: dict[str, torch.nn.Parameter], before_sums: Mapping[int, Tensor]
) -> dict[str, Tensor]:
    """Return this rank's own gradients in float64. before_sums: those of `kept_before_sums`."""
    found = {name: before_sums.get(id(tensor)) for name, tensor in tensors.items()}
    return {name: gradient_of(name, tensors[name]) if kept is None else kept for name, kept in found.items()}


def gradient_of(name: str, parameter: Tensor) -> Tensor:
    """Return the gradient in float64. Raises AssertionError if there is none, i.e. the backward never ran."""
    assert parameter.grad is not None, f"{name} has no gradient"
    return parameter.grad.double()


def shards_of(
    parameters: Sequence[Parameter],
    tensors: dict[str, Tensor],
    mesh: ParallelMesh,
    *,
    complete: bool = False,
) -> list[Shard]:
    shards = []
    for parameter in parameters:
        assert parameter.name in tensors, f"nothing of {parameter.name} was seen"
        for part, region, values in mesh.parts_of(parameter, tensors[parameter.name].detach()):
            in_parts = summed = is_partial(parameter, part, mesh)
            # Under ZeRO 2 and 3 backward sums them, and all holders of a head but the first have zeros.
            if complete:
                in_parts = mesh.is_shared(parameter, part)
            # Whole experts on ranks of tp get different tokens.
            whole = parameter.spec.axis == EXPERT_AXIS and not mesh.cuts_experts
            in_parts |= whole and not (complete and summed)
            shards.append(Shard(part.name, region, values.cpu().clone(), in_parts))
    return shards


def full_tensors(shape: ModelShape, shards: Sequence[Shard], *, add: bool) -> dict[str, Tensor]:
    """Assemble full tensors by name; overlapping shards are added (partial gradients) or must be equal (replicas)."""
    sizes = canonical_tensors(shape)
    if add:
        trained = (part.name for each in model_parameters(shape) if each.trained for part in each.spec.parts)
        sizes = {name: sizes[name] for name in trained}
    whole = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    filled = {name: torch.zeros(size, dtype=torch.bool) for name, size in sizes.items()}
    for shard in shards:
        assert shard.name in whole, f"{shard.name} has a gradient, but is frozen"
        region = tuple(
            slice(offset, offset + length)
            for offset, length in zip(shard.region.offsets, shard.region.shape, strict=True)
        )
        if add:
            whole[shard.name][region] += shard.values
        else:
            seen = filled[shard.name][region]
            assert torch.equal(whole[shard.name][region][seen], shard.values.double()[seen]), shard.name
            whole[shard.name][region] = shard.values.double()
        filled[shard.name][region] = True
    missing = [name for name, mask in filled.items() if not mask.all()]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def full_gradients(job: Job, results: Sequence[RankResult]) -> dict[str, Tensor]:
    """Return the gradient of the global mean loss from every rank's own: sum over dp, cp and tied copies."""
    whole: dict[str, Tensor] = {}
    replicas = [
        _without_tensor_replicas(job, [result for result in results if result.dp_rank == dp_rank])
        for dp_rank in range(job.layout.data * job.layout.context)
    ]
    if isinstance(job.shape, MixtureShape):
        # A rank has a part of the experts.
        replicas = [[shard for replica in replicas for shard in replica]]
    for once in replicas:
        for name, gradient in full_tensors(job.shape, once, add=True).items():
            whole[name] = whole.get(name, 0) + gradient
    return whole


def _without_tensor_replicas(job: Job, replica: Sequence[RankResult]) -> list[Shard]:
    """Return every shard of a replica once per stage.

    Tensor-parallel copies must be equal, and only one is kept, unless each is a partial gradient.
    """
    kept: list[Shard] = []
    for stage in range(job.layout.pipeline):
        ranks = replica[stage * job.layout.tensor : (stage + 1) * job.layout.tensor]
        seen: dict[tuple[str, TensorSlice], Tensor] = {}
        for shard in (shard for rank in ranks for shard in rank.gradients):
            key = (shard.name, shard.region)
            if key in seen and not shard.partial:
                assert_copies(seen[key], shard.values, what=shard.name)
                continue
            seen[key] = shard.values
            kept.append(shard)
    return kept
