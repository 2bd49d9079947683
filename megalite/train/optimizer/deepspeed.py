"""DeepSpeed's engine behind the optimizer protocol: ZeRO shards the optimizer, the pipeline is ours.

One engine a rank owns the rank's stage module. Under ZeRO 1 our buckets sum gradients once a step, during its last
backward, as on torch's path; ZeRO 2 and 3, at one stage, reduce them in every backward.
"""

import importlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor, nn

from megalite.config.deepspeed.zero_defaults import with_zero_defaults
from megalite.model.replica import Replica
from megalite.model.transformer import Stage
from megalite.parallel.gradient_buckets import GradientBuckets
from megalite.parallel.gradients import (
    all_reduce_replicated_gradients,
    all_reduce_replicated_in_backward,
    clip_factor,
    sync_tied_weights,
)
from megalite.parallel.mesh import ParallelMesh, ProcessGroup
from megalite.topology.parameters import Parameter
from megalite.topology.state import OptimizerState
from megalite.train.optimizer.deepspeed_experts import (
    count_cut_experts,
    exact_biases,
    experts_marked,
    partitioned_apart,
    reduce_in_float32,
)
from megalite.train.optimizer.deepspeed_gather import gather_in_shards
from megalite.train.optimizer.deepspeed_ops import load_operators, native_optimizer, operators
from megalite.train.optimizer.loss_scale import LossScale
from megalite.train.optimizer.nonfinite import FiniteFlags
from megalite.train.optimizer.protocol import Update, skip_update
from megalite.train.optimizer.rule import OptimizerParts
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.update import accumulate_in_float32, set_learning_rate, torch_optimizer
from megalite.train.optimizer.update_norms import UpdateNorms
from megalite.train.optimizer.zero_gradients import ZeroOneGradients
from megalite.train.optimizer.zero_state import zero_state


class DeepSpeedOptimizer:
    """ZeRO over the data-parallel ranks, its master weights in float32.

    Building it needs the whole stage of this rank in memory, under ZeRO 3 too, which partitions it from there.
    """

    def __init__(self, replica: Replica, settings: OptimizerSettings, config: Mapping[str, Any]):
        """`config`: DeepSpeed's JSON, in which a step is one micro batch (RunConfig.deepspeed_json)."""
        _quieten()
        _import_muon_uncompiled()
        parameters, mesh = replica.trained, replica.mesh
        self._parameters, self._mesh, self._tensors = parameters, mesh, replica.trained_tensors
        self._skip_nonfinite = settings.training.nonfinite != "stop"
        _mark(parameters, self._tensors, mesh)
        low_precision = any(tensor.element_size() < 4 for tensor in self._tensors.values())
        sum_in_fp32 = low_precision and settings.training.accumulation == "fp32"
        if sum_in_fp32:
            accumulate_in_float32(self._tensors)
        apart = bool(partitioned_apart(parameters, mesh))
        handed, once_a_step = _handed(config, sum_in_fp32=sum_in_fp32, apart=apart)
        numel = sum(tensor.numel() for tensor in self._tensors.values())
        if apart:
            # Buckets of dense weights must be the same on all ranks, which may hold other numbers of experts.
            numel = int(mesh.max_over_world(numel))
        asked = handed["zero_optimization"]
        zero = with_zero_defaults(asked, numel=numel, data=mesh.dense_gradients.size)
        handed["zero_optimization"] = zero
        gather_in_shards()
        load_operators(operators(config, native=settings.native))
        make = partial(native_optimizer, config) if settings.native else torch_optimizer
        optimizer = make(OptimizerParts(settings, parameters, self._tensors, mesh))
        if type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS:
            # DeepSpeed knows an optimizer by its very class, and calls any other untested.
            ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))
        self._finite = FiniteFlags(parameters, mesh)
        if not once_a_step:
            all_reduce_replicated_in_backward(parameters, self._tensors, mesh)
            # These hooks run before DeepSpeed's, which take the gradient away.
            for parameter in parameters:
                tensor = self._tensors[parameter.name]
                tensor.register_post_accumulate_grad_hook(
                    lambda tensor, parameter=parameter: self._finite.see(parameter, tensor.grad)
                )
        with exact_biases(replica), experts_marked(replica, optimizer, zero["stage"]):
            self._engine, self._zero, *_ = deepspeed.initialize(
                model=replica.stage,
                optimizer=optimizer,
                mpu=_ModelParallelUnit(mesh),
                config=handed,
            )
        if zero["stage"] == 3:
            # DeepSpeed's key for sums is refused under ZeRO 3. The divisor of its mean is 1 for sums.
            self._zero._gradient_averaging_world_size = lambda parameters, ranks: 1
            count_cut_experts(self._zero, mesh)
        elif apart and sum_in_fp32 and not once_a_step:
            reduce_in_float32(self._zero)
        self._once_a_step = ZeroOneGradients(replica, self._zero, asked) if once_a_step else None
        self.buckets: GradientBuckets | None = None
        if self._once_a_step is not None:
            self.buckets = self._once_a_step.early_sums
        self._scale = LossScale.of(settings.training)
        if self._scale is not None:
            self._zero.override_loss_scale(self._scale.value)
        self._partitions = zero_state(self._zero, replica, self._scale)
        self.state: OptimizerState = self._partitions
        self._clipping = settings.optimizer.gradient_clipping

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.value

    def wrap(self, stage: Stage) -> Callable[..., Tensor]:
        if self._once_a_step is not None:
            # ZeRO 1 takes no part in forward and backward, as in a pipeline of several stages.
            return stage
        # ZeRO 2 and 3 must go through the engine: they reduce in backward.
        return self._engine_forward

    def reduce_gradients(self) -> None:
        if self._once_a_step is None:
            return
        # Before ZeRO partitions the gradients: the two copies of a tied weight lie elsewhere in their partitions.
        all_reduce_replicated_gradients(self._parameters, self._tensors, self._mesh)
        self._once_a_step.finish_sums()
        self._once_a_step.hand_over()

    def gradients(self) -> Iterator[tuple[Parameter, int, Tensor]]:
        return iter(()) if self._once_a_step is None else self._once_a_step.handed_over()

    def squared_norm(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._mesh.device)

    def step(self, learning_rate: float, squared_norm: float, norms: UpdateNorms | None = None) -> Update:
        set_learning_rate(self._zero.optimizer, learning_rate)
        if self._scale is not None:
            self._zero.override_loss_scale(self._scale.value)
        with self._recorded(norms):
            self._engine.step()
        # On an overflow DeepSpeed has skipped the update, so the weights are still those of the step before.
        if self._zero.overflow:
            return self._skip()
        self._forget()
        sync_tied_weights(self._parameters, self._tensors, self._mesh)
        if self._scale is not None:
            self._scale.passed()
        norm = float(self._engine.get_global_grad_norm())
        if norms is not None:
            # The engine has clipped the gradients that were seen.
            norms.scale_gradients(1 / clip_factor(norm, self._clipping))
        return Update(norm)

    def _recorded(self, norms: UpdateNorms | None) -> AbstractContextManager[None]:
        if norms is None:
            return nullcontext()
        return norms.watch(self._zero.optimizer, self._partitions.ranges(), gradients=True)

    def _skip(self) -> Update:
        if self._once_a_step is not None:
            for parameter, start, gradient in self._once_a_step.handed_over():
                self._finite.see(parameter, gradient, start)
        tensor = self._finite.first_nonfinite()
        self._forget()
        return skip_update(self._scale, tensor, skip_nonfinite=self._skip_nonfinite)

    def skip(self) -> None:
        zero = self._zero
        # The engine lets go of a step whose norm is not finite: by the first name in ZeRO 1 and 2, by the second in 3.
        zero.scaled_global_norm = lambda: math.inf
        zero._overflow_check_and_loss_scale_update = lambda **_: setattr(zero, "overflow", True)
        try:
            self._engine.step()
        finally:
            del zero.scaled_global_norm, zero._overflow_check_and_loss_scale_update
        if not zero.overflow:
            raise RuntimeError("DeepSpeed has made an update that was to be skipped")
        self._forget()

    def _forget(self) -> None:
        """Let go of what is known of the step's gradients."""
        self._finite.clear()
        if self._once_a_step is not None:
            self._once_a_step.forget()

    def _engine_forward(self, input_ids: Tensor, **arguments: Any) -> Tensor:
        self._finite.backward_ends()
        losses: Tensor = self._engine(input_ids, **arguments)
        if self._scale is not None and losses.requires_grad:
            # The runner scales the loss; the engine refuses a backward if it has not been told so.
            self._engine.scale(losses.sum())
        return losses


def _handed(config: Mapping[str, Any], *, sum_in_fp32: bool, apart: bool) -> tuple[dict[str, Any], bool]:
    """What DeepSpeed is given to do what `config` asks for; and whether it reduces gradients once a step.

    sum_in_fp32: gradients of low-precision parameters are summed and reduced in float32. apart: there are experts,
    which DeepSpeed reduces over other ranks than dense weights.
    """
    zero = dict(config["zero_optimization"])
    stage = zero["stage"]
    offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    once_a_step = stage == 1
    handed = {**config, "zero_optimization": zero}
    if config.get("fp16", {}).get("enabled"):
        # The scale is ours, so that it goes the same way with and without ZeRO; DeepSpeed is told it at every step.
        handed["fp16"] = {"enabled": True, "loss_scale": 1}
    if stage < 3:
        handed["gradient_allreduce_op"] = "sum"
    if sum_in_fp32:
        handed["data_types"] = {**config.get("data_types", {}), "grad_accum_dtype": "fp32"}
        handed.setdefault("communication_data_type", "fp32")
        if stage == 2 and offloads:
            # DeepSpeed would sum micro batches on the CPU in 16 bits: stage 1 there has the sums of autograd.
            zero["stage"], once_a_step = 1, True
        elif stage == 2 or (stage == 1 and not offloads):
            # Stage 1 would become BF16_Optimizer, which cannot reduce once a step: stage 2's optimizer can, and is then
            # the same. Its contiguous buckets have 16 bits.
            zero |= {"stage": 2, "contiguous_gradients": False}
    if apart and stage < 3:
        # The only settings with which DeepSpeed reduces experts apart; sums once a step are ours.
        zero |= {"contiguous_gradients": True, "reduce_scatter": True}
    if not once_a_step:
        # It is ours to say when a step ends; until then DeepSpeed sums what each backward brings.
        handed["managed_gradient_accumulation"] = False
    return handed, once_a_step


class _ModelParallelUnit:
    """The `mpu` that DeepSpeed asks for groups; to it, "model parallel" is one whole replica (tp x pp)."""

    def __init__(self, mesh: ParallelMesh):
        self._mesh = mesh

    def get_data_parallel_group(self) -> ProcessGroup | None:
        return self._mesh.dense_gradients.group

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dense_gradients.size

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dense_gradients.rank

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self._mesh.dense_gradients.ranks)

    def get_model_parallel_group(self) -> ProcessGroup | None:
        return self._mesh.replica.group

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.replica.size

    def get_model_parallel_rank(self) -> int:
        return self._mesh.replica.rank

    def get_tensor_model_parallel_group(self) -> ProcessGroup | None:
        return self._mesh.tp.group

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.tp.size

    def get_tensor_model_parallel_rank(self) -> int:
        return self._mesh.tp.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._mesh.pp.size


def _mark(parameters: Sequence[Parameter], tensors: Mapping[str, nn.Parameter], mesh: ParallelMesh) -> None:
    """Tell DeepSpeed's norm what counts: shards on every rank, replicas on tp rank 0, tied weights once."""
    for parameter in parameters:
        tensor = tensors[parameter.name]
        # Where ranks of tp have whole experts, each has others.
        if parameter.spec.dim is not None or mesh.cut_over(parameter).size < mesh.tp.size:
            tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
        if not mesh.is_first_stage(parameter):
            tensor.ds_pipe_replicated = True  # type: ignore[attr-defined]


def _quieten() -> None:
    """Leave out what costs minutes or hides our own lines: the shared-memory operator's build, INFO messages."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed 0.19 calls a collective by the name it had before torch 2.13, at every step of every rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def _import_muon_uncompiled() -> None:
    """Import the Muon that DeepSpeed's engine looks for, and that nobody uses here, without compiling its kernels.

    That would import torch's compiler: two seconds and 115 MB in every process.
    """
    compile_kernels, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        with suppress(ImportError):
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_kernels
