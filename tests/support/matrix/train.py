"""A row's run, trained by the real trainer on the ranks of its layout, and compared with one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.model.stages import build_replica
from megalite.parallel.gradient_buckets import kept_before_sums
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.topology.parameters import Parameter
from megalite.topology.shape import ModelShape
from megalite.train import assemble
from megalite.train.optimizer import deepspeed
from megalite.train.optimizer import torch as torch_path
from megalite.train.step.options import context_method
from megalite.train.step.train_step import TrainStep
from megalite.verify.record import start_adapter, watch_gradients
from tests.support.matrix.axes import Row, Settings
from tests.support.matrix.rows import config_of, reference_of, settings_of
from tests.support.mutations import planted_fault
from tests.support.parity import (
    COPIES_RTOL,
    NARROW_FLOOR,
    layout_bounds,
    narrow_bound,
    relative_error,
    tensor_errors,
)
from tests.support.ranks import RankPool
from tests.support.tiny import in_documents, tiny_batch
from tests.support.training import (
    RankResult,
    Shard,
    full_tensors,
    rows_of,
    shards_of,
    whole_weights,
)

ROW_SECONDS = 120


class TinyLoader:
    """Replaces StepLoader: gives this rank's rows of a small global batch with unequal token weights."""

    def __init__(self, config: RunConfig, mesh: ParallelMesh, shape: ModelShape):
        self._config, self._mesh, self._shape = config, mesh, shape

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> StepBatch:
        sequences = self._config.batch.global_batch_size
        whole = tiny_batch(
            self._shape,
            sequences,
            sequence_length=self._config.training.sequence_length,
            step=consumed_samples // sequences,
        )
        if self._config.data.document_mask:
            whole = in_documents(whole)
        if self._config.data.kind == "preference":
            # A table of the reference's losses, for models that are not the reference with their adapter off.
            losses = 30 + (5 * whole.sample_indices % 7).double()
            whole = replace(whole, loss_mask=(whole.labels >= 0).float(), reference=losses)
        share = sequences // self._mesh.batch.size
        mine = slice(self._mesh.batch.rank * share, (self._mesh.batch.rank + 1) * share)
        return rows_of(replace(whole, loss_mask=whole.loss_mask.to(dtype)), mine)


def train_settings(settings: Settings, fault: str | None = None) -> RankResult:
    """Train the run on this rank of the current process group, with the trainer of `megalite train`."""
    with planted_fault(fault):
        config = config_of(settings)
        mesh = ParallelMesh.over_world(
            config.layout,
            sequence_parallel=config.parallel.sequence,
            context_method=context_method(config),
        )
        if config.training.compile:  # dynamo's recompilation limit counts earlier rows of this process too
            torch._dynamo.reset()
        assert config.model.vocab_size != "auto"
        shape = config.shape(config.model.vocab_size)
        result = RankResult(mesh.dense_gradients.rank)
        with _first_gradients(config.zero_stage) as gradients:
            trainer = TrainStep(config, mesh, shape, cast(StepLoader, TinyLoader(config, mesh, shape)))
            parameters, tensors = trainer.replica.parameters, trainer.replica.tensors
            trained = trainer.replica.trained_tensors
            with whole_weights(config.zero_stage, tensors):
                result.initial = shards_of(parameters, tensors, mesh)
            for step in range(trainer.total_steps):
                scale = trainer.optimizer.loss_scale
                report = trainer.train_step()
                result.losses.append(report.loss)
                result.norms.append(report.grad_norm)
                if step == 0:
                    unscaled = {name: gradient.double() / scale for name, gradient in gradients().items()}
                    result.without_gradient = sorted(trained.keys() - unscaled.keys())
                    used = [each for each in parameters if each.name in unscaled]
                    result.gradients = shards_of(used, unscaled, mesh)
        with whole_weights(config.zero_stage, tensors):
            result.final = shards_of(parameters, tensors, mesh)
        return result


@contextmanager
def _first_gradients(zero_stage: int) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Yield a function that returns the gradients of the first step of a trainer built within, before the sum over dp.

    If DeepSpeed removes gradients in every backward (most of ZeRO 2 and 3), they are the sums over the backwards.
    """
    complete: list[dict[str, Tensor]] = []
    brought: list[dict[str, Tensor]] = []

    def build(*arguments: Any, **named: Any) -> Any:
        replica = build_replica(*arguments, **named)
        brought.append({})
        if zero_stage >= 2:
            # Register the hooks before DeepSpeed's own.
            watch_gradients(replica.trained_tensors, brought[-1])
        start_adapter(replica, seed=11)
        return replica

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(assemble, "build_replica", build))
        before_sums = patches.enter_context(kept_before_sums())
        for module in (torch_path, deepspeed):
            watched = _watched(module.all_reduce_replicated_gradients, complete, before_sums)
            patches.enter_context(mock.patch.object(module, "all_reduce_replicated_gradients", watched))
        yield lambda: (complete or brought)[0]


def _watched(
    all_reduce_replicated_gradients: Callable[..., None],
    found: list[dict[str, Tensor]],
    before_sums: Mapping[int, Tensor],
) -> Callable[..., None]:
    def complete(parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh) -> None:
        all_reduce_replicated_gradients(parameters, tensors, mesh)
        gradients = {name: before_sums.get(id(tensor), tensor.grad) for name, tensor in tensors.items()}
        found.append(
            {
                # Copy, because the gradients are later clipped in place.
                name: gradient.to(torch.float64, copy=True)
                for name, gradient in gradients.items()
                if gradient is not None
            }
        )

    return complete


@dataclass(frozen=True)
class Trained:
    """The results of a run, combined over its ranks.

    gradients: of the global mean loss in the first step. weights: after the last step.
    """

    losses: list[float]
    norms: list[float]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, shape: ModelShape, results: Sequence[RankResult]) -> "Trained":
        """Combine the ranks' results. Raises AssertionError if copies on several ranks differ."""
        first = results[0]
        for rank, result in enumerate(results):
            same = result.losses == first.losses and result.norms == first.norms
            assert same, f"rank {rank} reports {result.losses}, {result.norms}: not what rank 0 does"
            missing = ", ".join(result.without_gradient)
            assert not missing, f"no gradient on rank {rank} of {missing}"
        return cls(
            first.losses,
            first.norms,
            full_tensors(shape, [shard for result in results for shard in result.initial], add=False),
            summed_gradients(shape, results),
            full_tensors(shape, [shard for result in results for shard in result.final], add=False),
        )


def summed_gradients(shape: ModelShape, results: Sequence[RankResult]) -> dict[str, Tensor]:
    """Return the sum of the replicas' full gradients.

    Copies within a replica must be equal, or zero if another copy counts. Raises AssertionError if they differ.
    """
    shards: list[Shard] = []
    for replica in {result.dp_rank for result in results}:
        kept: dict[Any, Shard] = {}
        of_replica = (shard for result in results if result.dp_rank == replica for shard in result.gradients)
        for place, shard in enumerate(of_replica):
            # Ranks with the same experts get different tokens.
            copy = place if ".experts." in shard.name else None
            before = kept.setdefault((shard.name, shard.region, copy), shard)
            if before is shard:
                continue
            if not before.values.any():
                kept[shard.name, shard.region, copy] = shard
            elif shard.values.any():
                same = relative_error(shard.values, before.values) <= COPIES_RTOL
                assert same, f"copies of the gradient of {shard.name} differ"
        shards += kept.values()
    return full_tensors(shape, shards, add=True)


@dataclass(frozen=True)
class Outcome:
    """The largest error of a row against its reference for each quantity, and the allowed errors."""

    errors: Mapping[str, float]
    allowed: Mapping[str, float]
    worst: Mapping[str, str] = field(default_factory=dict)
    """The tensor or step with the largest error."""

    @property
    def problems(self) -> list[str]:
        return [
            f"{what}: relative error {error:.2e} at {self.worst[what]}, allowed {self.allowed[what]:.1e}"
            for what, error in self.errors.items()
            if not error <= self.allowed[what]
        ]

    def require(self) -> None:
        assert not self.problems, "; ".join(self.problems)


class Matrix:
    """Runs rows on a pool of ranks; a reference is trained once for all rows that share it."""

    def __init__(self, pool: RankPool):
        self._pool = pool
        self._references: dict[str, Trained] = {}

    def run(self, row: Row, fault: str | None = None) -> Outcome:
        """Train the row and compare it with its reference. Raises AssertionError if its ranks disagree."""
        settings, alone = settings_of(row), reference_of(row)
        trained = self._train(settings, fault)
        one = self._reference(alone)
        for name, initial in one.initial.items():
            # DoRA's magnitudes are sums over tp.
            same = torch.equal(trained.initial[name], initial) or "magnitude" in name
            assert same, f"{name} starts from other values"
        if row["precision"] in NARROW_FLOOR:
            exact = self._reference({**alone, "training.precision": "fp64"})
            own = _worst(_errors(one, exact))
            allowed = {what: narrow_bound(row["precision"], error) for what, (error, _) in own.items()}
            return _outcome(_errors(trained, exact), allowed)
        return _outcome(_errors(trained, one), layout_bounds(row["precision"], int(row["zero"])))

    def _reference(self, settings: Settings) -> Trained:
        key = repr(sorted(settings.items()))
        if key not in self._references:
            self._references[key] = self._train(settings)
        return self._references[key]

    def _train(self, settings: Settings, fault: str | None = None) -> Trained:
        config = config_of(settings)
        results = self._pool.run(
            train_settings, config.layout.world_size, timeout=ROW_SECONDS, settings=settings, fault=fault
        )
        assert config.model.vocab_size != "auto"
        shape = config.shape(config.model.vocab_size)
        return Trained.of(shape, results)


def _errors(trained: Trained, reference: Trained) -> dict[str, dict[str, float]]:
    """Return quantity -> step or tensor -> relative error."""
    return {
        "losses": _step_errors(trained.losses, reference.losses),
        "norms": _step_errors(trained.norms, reference.norms),
        "gradients": tensor_errors(trained.gradients, reference.gradients),
        "weights": tensor_errors(trained.weights, reference.weights),
    }


def _step_errors(values: Sequence[float], expected: Sequence[float]) -> dict[str, float]:
    return {
        f"step {step}": relative_error(*pair)
        for step, pair in enumerate(zip(values, expected, strict=True), start=1)
    }


def _worst(errors: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, str]]:
    return {what: max((error, name) for name, error in each.items()) for what, each in errors.items()}


def _outcome(errors: Mapping[str, Mapping[str, float]], allowed: Mapping[str, float]) -> Outcome:
    worst = _worst(errors)
    return Outcome(
        {what: error for what, (error, _) in worst.items()},
        allowed,
        {what: name for what, (_, name) in worst.items()},
    )
