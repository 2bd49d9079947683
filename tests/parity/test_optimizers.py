"""Muon, Adafactor and Lion update alike in any layout, also after a resume; faults planted in them depart."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import read_manifest
from megalite.config.sections.schema import OptimizerConfig
from megalite.convert.universal.export import export_universal
from megalite.errors import CheckpointError
from megalite.topology.axes import Layout
from megalite.topology.parameter_groups import ParameterGroup
from megalite.topology.parameters import model_parameters
from megalite.train.optimizer import muon
from megalite.train.optimizer.settings import OptimizerSettings
from tests.distributed.test_checkpoint import run as run_and_save
from tests.support.museum import exhibit
from tests.support.mutations import OPTIMIZER_FAULTS, planted_fault
from tests.support.options import changed
from tests.support.parity import FLOAT32_RTOL, LAYOUT_RTOL, assert_close, assert_same_tensors
from tests.support.planted import Planted
from tests.support.ranks import RankFailed, RankPool, RanksHung
from tests.support.tiny import tiny_shape
from tests.support.training import ALONE, Job, RankResult, full_tensors, train_on_rank

# Two ranks hold 38 and 37 of the 75 hidden units; 4 hold a query head and a half of the key-value heads each.
SHAPE = replace(tiny_shape(layers=2), intermediate_size=75)
SHARED_HEADS = replace(SHAPE, num_key_value_heads=1)
GROUPS = (ParameterGroup("*.0.mlp.*", 0.25, 0.3), ParameterGroup("*norm*", 2.0, 0.2))
MUON = OptimizerSettings(OptimizerConfig(name="muon", gradient_clipping=0.5, ema_decay=0.5), groups=GROUPS)
LION = changed(MUON, name="lion", momentum=0.0)
ADAFACTOR = changed(MUON, name="adafactor", momentum=0.0)
SETTINGS = {"muon": MUON, "lion": LION, "adafactor": ADAFACTOR}


def job_of(name: str, layout: Layout = ALONE, **changes: object) -> Job:
    job = Job(SHAPE, layout, optimizer=SETTINGS[name], learning_rate=1e-2, steps=3)
    return replace(job, **changes)  # type: ignore[arg-type]


def trained(job: Job, fault: str | None = None) -> RankResult:
    with planted_fault(fault):
        return train_on_rank(job)


def weights(job: Job, results: Sequence[RankResult]) -> dict[str, Tensor]:
    return full_tensors(job.shape, [shard for result in results for shard in result.final], add=False)


@pytest.fixture(scope="module")
def alone(ranks: RankPool):
    """The same job in one process, run once for each job."""

    @cache
    def run(job: Job) -> tuple[RankResult, dict[str, Tensor]]:
        job = replace(job, layout=Layout(), sequence_parallel=False, zero_stage=0)
        results = ranks.run(trained, world_size=1, job=job)
        return results[0], weights(job, results)

    return run


def require_one_process(ranks: RankPool, alone, job: Job, rtol: float, fault: str | None = None) -> None:
    results = ranks.run(trained, world_size=job.layout.world_size, job=job, fault=fault)
    one, expected = alone(job)
    for result in results:
        assert_close(result.losses, one.losses, rtol=rtol, what="losses")
    assert_same_tensors(weights(job, results), expected, rtol=rtol)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job_of("muon", Layout(tensor=2)), id="tp2"),
        pytest.param(job_of("muon", Layout(tensor=2), sequence_parallel=True), id="tp2, sequence"),
        pytest.param(job_of("muon", Layout(tensor=2), shape=SHARED_HEADS), id="tp2, shared heads"),
        pytest.param(
            job_of("muon", Layout(pipeline=2), shape=replace(SHAPE, tie_word_embeddings=True)), id="pp2, tied"
        ),
        pytest.param(job_of("muon", Layout(data=2)), id="dp2"),
        pytest.param(job_of("muon", Layout(pipeline=2, tensor=2)), id="tp2-pp2"),
        pytest.param(
            job_of("muon", Layout(data=3, tensor=2), micro_batch_size=1),
            id="dp3-tp2",
            marks=pytest.mark.extended,
        ),
        pytest.param(job_of("lion", Layout(data=2, tensor=2)), id="lion, dp2-tp2"),
        pytest.param(
            job_of("adafactor", Layout(tensor=2), sequence_parallel=True), id="adafactor, tp2, sequence"
        ),
        pytest.param(
            job_of("adafactor", Layout(tensor=2), shape=SHARED_HEADS), id="adafactor, tp2, shared heads"
        ),
        pytest.param(
            job_of("adafactor", Layout(pipeline=2, data=2), shape=replace(SHAPE, tie_word_embeddings=True)),
            id="adafactor, pp2-dp2, tied",
        ),
    ],
)
def test_a_layout_updates_like_one_process_in_float64(ranks: RankPool, alone, job: Job) -> None:
    require_one_process(ranks, alone, job, LAYOUT_RTOL)


def shapes_computed(job: Job) -> list[tuple[int, ...]]:
    """Train on this rank and return the shapes of the matrices that it orthogonalised."""
    with mock.patch.object(muon, "orthogonalised", side_effect=muon.orthogonalised) as spy:
        train_on_rank(job)
    return [tuple(call.args[0].shape) for call in spy.call_args_list]


def test_each_matrix_is_orthogonalised_once_and_the_ranks_share_the_work(ranks: RankPool) -> None:
    settings = replace(MUON, groups=())
    job = job_of("muon", Layout(data=2, tensor=2), optimizer=settings, steps=1)
    found = ranks.run(shapes_computed, world_size=4, job=job)
    matrices = [part for each in model_parameters(SHAPE) if each.is_hidden_matrix for part in each.spec.parts]
    assert sorted(shape for each in found for shape in each) == sorted(part.shape for part in matrices)
    work = [sum(rows * columns * min(rows, columns) for rows, columns in each) for each in found]
    assert max(work) <= 1.5 * min(work)


@pytest.mark.parametrize("name", OPTIMIZER_FAULTS)
def test_a_planted_fault_departs_from_one_process(ranks: RankPool, alone, name: str) -> None:
    shown_by = OPTIMIZER_FAULTS[name].shown_by
    tensor, pipeline, data = (int(each[2:]) for each in shown_by.get("layout", "tp1-pp1-dp1").split("-"))
    job = job_of(shown_by["optimizer"], Layout(pipeline, data, tensor))
    with pytest.raises(AssertionError) as departed:
        require_one_process(ranks, alone, job, LAYOUT_RTOL, fault=name)
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.extended), 3])
def test_lion_updates_the_partitions_of_zero(ranks: RankPool, alone, stage: int) -> None:
    settings = changed(LION, ema_decay=0.0, groups=())
    job = job_of("lion", Layout(data=2), zero_stage=stage, optimizer=settings, dtype=torch.float32)
    require_one_process(ranks, alone, job, FLOAT32_RTOL)


def without_momentum(shard_targets: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shard, key, mesh: () if key == "momentum_buffer" else shard_targets(shard, key, mesh)


@exhibit(
    "Megatron-LM PR#6920",
    subject="checkpoints",
    there="a run with Muon and a sharded optimizer went on from another state than it had saved, with usual losses",
    here="weights and momentum go on in every layout as in the undisturbed run",
    fault=Planted("megalite.checkpoint.load:shard_targets", without_momentum),
    costly=True,
)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            job_of("muon", Layout(tensor=2)), job_of("muon", Layout(pipeline=2)), id="muon, tp2 to pp2"
        ),
        pytest.param(
            job_of("adafactor", Layout(tensor=2)),
            job_of("adafactor", Layout(pipeline=2)),
            id="adafactor, tp2 to pp2",
        ),
        pytest.param(
            job_of(
                "lion", Layout(data=2), zero_stage=1, dtype=torch.float32, optimizer=replace(LION, groups=())
            ),
            job_of("lion", dtype=torch.float32, optimizer=replace(LION, groups=())),
            id="lion, ZeRO to one process",
        ),
    ],
)
def test_a_run_goes_on_in_another_layout(
    ranks: RankPool, alone, tmp_path: Path, before: Job, after: Job
) -> None:
    run_and_save(ranks, replace(before, steps=1), tmp_path)
    resumed = run_and_save(ranks, after, tmp_path)
    one, expected = alone(after)
    rtol = LAYOUT_RTOL if after.dtype == torch.float64 else FLOAT32_RTOL
    assert_close(resumed[0].losses, one.losses[1:], rtol=rtol, what="losses")
    assert_same_tensors(weights(after, resumed), expected, rtol=rtol)


def test_a_checkpoint_of_another_rule_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    run_and_save(ranks, job_of("muon", steps=1), tmp_path)
    with pytest.raises(RankFailed, match=r"set optimizer\.name"):
        run_and_save(ranks, job_of("lion", steps=2), tmp_path)
    # DeepSpeed's file format has AdamW's moments of every tensor.
    with pytest.raises(CheckpointError, match="momentum_buffer, but a universal checkpoint needs AdamW's"):
        export_universal(tmp_path / "step-000001", tmp_path / "universal")


@pytest.mark.parametrize(("name", "key"), [("muon", "momentum_buffer"), ("adafactor", "col_var")])
def test_a_state_that_lacks_a_tensor_is_noticed(ranks: RankPool, tmp_path: Path, name: str, key: str) -> None:
    run_and_save(ranks, job_of(name, steps=1), tmp_path)
    manifest = read_manifest(tmp_path / "step-000001")
    check_coverage(manifest, tmp_path)
    lost, *kept = manifest.tensors[key].items()
    with pytest.raises(CheckpointError, match=f"{key} of {lost[0]} is missing"):
        check_coverage(replace(manifest, tensors={**manifest.tensors, key: dict(kept)}), tmp_path)
