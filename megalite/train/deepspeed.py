"""DeepSpeed's engine behind the trainer's optimizer protocol: ZeRO shards the optimizer, the pipeline is ours.

One engine a rank owns the rank's stage module. Under ZeRO 1 gradients are reduced once a step, after the pipeline and
the tied sums, through the public `coalesce_grad_reduction`; ZeRO 2 and 3, at one stage, reduce them in every backward.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
from torch import Tensor, nn

from megalite.parallel.gradients import complete_gradients, copy_shared_weights
from megalite.parallel.mesh import ParallelMesh, ProcessGroup
from megalite.topology.parameters import Parameter
from megalite.topology.state import OptimizerState
from megalite.train.optimizer import (
    OptimizerSettings,
    Update,
    require_finite,
    set_learning_rate,
    torch_optimizer,
)
from megalite.train.zero_state import zero_state


class DeepSpeedOptimizer:
    """ZeRO over the data-parallel ranks, its master weights in float32.

    Building it needs the whole stage of this rank in memory, under ZeRO 3 too, which partitions it from there.
    """

    def __init__(
        self,
        stage: nn.Module,
        parameters: Sequence[Parameter],
        mesh: ParallelMesh,
        settings: OptimizerSettings,
        config: Mapping[str, Any],
    ):
        """`config`: DeepSpeed's own JSON, with the micro batches of a step counted as one (config/deepspeed.py)."""
        _quieten()
        self._stage, self._parameters, self._mesh = stage, parameters, mesh
        self._tensors = dict(stage.named_parameters())
        self._once_a_step = config["zero_optimization"]["stage"] == 1
        _mark(parameters, self._tensors, mesh)
        self._engine, self._zero, *_ = deepspeed.initialize(
            model=stage,
            optimizer=torch_optimizer(settings, parameters, self._tensors),
            mpu=_ModelParallelUnit(mesh),
            # Where it is ours to say when a step ends, DeepSpeed sums what each backward brings until then.
            config={**config, "managed_gradient_accumulation": self._once_a_step},
        )
        self.state: OptimizerState = zero_state(self._zero, parameters, self._tensors, mesh)

    @property
    def loss_scale(self) -> float:
        return float(self._zero.loss_scale)

    def forward(self, input_ids: Tensor, **arguments: Tensor) -> Tensor:
        # As a pipeline runs it: the engine has a part in a backward only where it reduces in it.
        run = self._stage if self._once_a_step else self._engine
        losses: Tensor = run(input_ids, **arguments)
        return losses

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        if not self._once_a_step:
            yield
            return
        with self._engine.coalesce_grad_reduction():
            yield
            if self._zero.use_grad_accum_attribute:
                # Where the pipeline ran the raw module, no engine hook has moved the gradients to their fp32 sums.
                self._zero.fill_grad_accum_attribute()
            # Before the reduction: ZeRO partitions the gradients, and a tied weight's two copies differ in place.
            gradient_of = self._zero.get_gradient_for_reduction
            complete_gradients(self._parameters, self._tensors, self._mesh, gradient_of)

    def step(self, learning_rate: float) -> Update:
        set_learning_rate(self._zero.optimizer, learning_rate)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        # On an overflow DeepSpeed has skipped the update, so the weights are still those of the step before.
        require_finite(norm)
        copy_shared_weights(self._parameters, self._tensors, self._mesh)
        return Update(norm)


class _ModelParallelUnit:
    """The `mpu` that DeepSpeed asks for groups; to it, "model parallel" is one whole replica (tp x pp)."""

    def __init__(self, mesh: ParallelMesh):
        self._mesh = mesh

    def get_data_parallel_group(self) -> ProcessGroup | None:
        return self._mesh.dp.group

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dp.size

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp.rank

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self._mesh.dp.ranks)

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
        if parameter.spec.dim is not None:
            tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
        if len(parameter.spec.stages) > 1 and mesh.at.pp != parameter.spec.stages[0]:
            tensor.ds_pipe_replicated = True  # type: ignore[attr-defined]


def _quieten() -> None:
    """Leave out what costs minutes or hides our own lines: the shared-memory operator's build, INFO messages."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed 0.19 calls a collective by the name it had before torch 2.13, at every step of every rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
