"""The layout of a run that goes on with fewer ranks: nearest first, legal by the configuration's own rules."""

from pathlib import Path

import pytest

from megalite.config.smaller_layout import smaller_layout
from megalite.errors import LaunchError

RUN = """
[model]
preset = "tiny"
[data]
source = "stdlib"
[training]
steps = 4
sequence_length = 32
"""


def run_file(
    folder: Path, parallel: str, training: str = "global_batch_size = 24\nmicro_batch_size = 1"
) -> Path:
    path = folder / "run.toml"
    path.write_text(f"{RUN}{training}\n[parallel]\n{parallel}\n")
    return path


LAYOUTS = [
    # (tensor, context, pipeline, data), slots left -> the layout, its micro batches of the same 24 sequences
    ((1, 1, 1, 4), 3, (1, 1, 1, 3), 8),
    ((1, 1, 1, 4), 2, (1, 1, 1, 2), 12),
    ((2, 1, 2, 2), 6, (2, 1, 2, 1), 24),  # data first
    ((2, 1, 2, 2), 3, (2, 1, 1, 1), 24),  # then the pipeline
    ((2, 1, 2, 1), 1, (1, 1, 1, 1), 24),  # tensor last
    ((1, 1, 1, 8), 7, (1, 1, 1, 6), 4),  # 7 does not divide 24
    ((4, 1, 1, 1), 3, (2, 1, 1, 1), 24),  # 3 does not divide the heads
    ((1, 4, 1, 2), 7, (1, 4, 1, 1), 24),  # data before context
    ((1, 4, 2, 1), 6, (1, 2, 2, 1), 24),  # context before the pipeline
    ((2, 2, 1, 2), 3, (2, 1, 1, 1), 24),
]


@pytest.mark.parametrize(("whole", "slots", "left", "micro_batches"), LAYOUTS)
def test_the_nearest_layout_keeps_the_global_batch(tmp_path, whole, slots, left, micro_batches):
    tensor, context, pipeline, data = whole
    path = run_file(tmp_path, f"tensor = {tensor}\ncontext = {context}\npipeline = {pipeline}\ndata = {data}")
    run = smaller_layout(path, [], tensor * context * pipeline * data, slots).loaded.config
    assert (run.layout.tensor, run.layout.context, run.layout.pipeline, run.layout.data) == left
    assert (run.training.global_batch_size, run.training.micro_batches) == (24, micro_batches)


@pytest.mark.parametrize(
    ("parallel", "slots", "left"),
    [
        ("data = 4\nexpert = 4", 3, (3, 3)),  # three ranks need not divide eight experts
        ("data = 8\nexpert = 8", 6, (6, 6)),
        ("data = 4\nexpert = 2", 3, (3, 1)),
        ("data = 4\nexpert = 2", 2, (2, 2)),
    ],
)
def test_experts_stay_on_as_many_ranks_as_fit(tmp_path, parallel: str, slots: int, left: tuple[int, int]):
    path = run_file(tmp_path, parallel)
    sizes = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mixture = [f"--model.{name}={value}" for name, value in sizes.items()]
    layout = smaller_layout(path, mixture, int(parallel[7]), slots).loaded.config.layout
    assert (layout.data, layout.expert) == left


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("context", "slots", "left"), [(1, 3, (1, 3)), (1, 1, (1, 1)), (2, 7, (2, 3)), (2, 3, (2, 1))]
)
def test_zero_keeps_its_stage_with_fewer_ranks(tmp_path, stage, context, slots, left):
    path = run_file(
        tmp_path, f"context = {context}\ndata = 4\n[deepspeed.zero_optimization]\nstage = {stage}"
    )
    run = smaller_layout(path, [], 4 * context, slots).loaded.config
    assert (run.layout.context, run.layout.data) == left and run.zero_stage == stage
    assert run.batch.global_batch_size == 24


def test_a_run_that_fits_is_left_alone(tmp_path):
    assert smaller_layout(run_file(tmp_path, "data = 2"), [], 2, 2).flags == ()


def test_the_flags_alone_lead_to_the_layout_whatever_sets_the_batch(tmp_path):
    """With two other settings of the batch in the file, and data "auto", the global batch is still the whole run's."""
    path = run_file(tmp_path, 'data = "auto"', "micro_batch_size = 3\nmicro_batches = 2")
    found = smaller_layout(path, ["--training.steps", "9"], 4, 3)
    assert found.loaded.config.training.global_batch_size == 24
    assert found.loaded.config.layout.data == 3 and found.loaded.config.training.steps == 9
    assert "--training.micro_batches=8" in found.flags


def test_a_micro_batch_shrinks_where_its_size_divides_nothing(tmp_path):
    path = run_file(tmp_path, "data = 2", "global_batch_size = 8\nmicro_batch_size = 4")
    assert smaller_layout(path, [], 2, 1).loaded.config.training.micro_batches == 2
    odd = run_file(tmp_path, "data = 4", "global_batch_size = 24\nmicro_batch_size = 6\nmicro_batches = 1")
    three = smaller_layout(odd, [], 4, 3).loaded.config
    assert (three.layout.data, three.training.micro_batch_size) == (3, 2)


def test_stages_of_unequal_layers_and_chunks_follow_the_pipeline(tmp_path):
    path = run_file(tmp_path, "pipeline = 2\nlayers_per_stage = [1, 3]")
    assert smaller_layout(path, [], 2, 1).loaded.config.parallel.layers_per_stage is None
    chunks = run_file(tmp_path, 'pipeline = 2\nschedule = "interleaved_1f1b"\nvirtual_stages = 2')
    assert smaller_layout(chunks, [], 2, 1).loaded.config.layout.world_size == 1


def test_deepspeeds_own_batch_decides_what_is_legal(tmp_path):
    """Its JSON fixes the micro batch, so that 3 replicas are illegal; with the accumulation fixed too, all are."""
    json = '{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": %s}'
    path = run_file(tmp_path, 'data = 4\n[deepspeed]\nconfig = "ds.json"', "global_batch_size = 24")
    (tmp_path / "ds.json").write_text(json % '"auto"')
    assert smaller_layout(path, [], 4, 3).loaded.config.training.micro_batches == 4
    (tmp_path / "ds.json").write_text(json % 2)
    with pytest.raises(
        LaunchError, match=r"no layout of 3 ranks or fewer .* same global batch of 24; "
    ) as error:
        smaller_layout(path, [], 4, 3)
    assert "differs from 2 (gradient_accumulation_steps in ds.json); make them equal" in str(error.value)
