"""A small planned run and changes to it."""

from dataclasses import replace
from typing import Any

from megalite.config.sections.training_section import ComputeSettings
from megalite.planner.cluster import Cluster
from megalite.planner.planned_run import PlannedRun
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split

SHAPE = ModelShape(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=8,
)

ALONE = Layout()
H100 = "H100 80GB HBM3"
CLUSTER = Cluster(H100, nodes=2, cards_per_node=4, efficiency=0.5, link_efficiency=1.0)
BATCH = {"training.global_batch_size": 16, "training.micro_batch_size": 1, "training.precision": "bf16"}


def plan(
    shape: ModelShape = SHAPE,
    *,
    layout: Layout = ALONE,
    schedule: str = "1f1b",
    recompute: Any = "none",
    layers: tuple[int, ...] | None = None,
    **changes: Any,
) -> PlannedRun:
    """Return the plan of four micro batches of 2 x 32 tokens in bf16, with changes."""
    chunks = SCHEDULES[schedule].default_chunks if layout.pipeline > 1 else 1
    split = pipeline_split(
        shape.num_hidden_layers,
        layout.pipeline,
        chunks_per_stage=chunks,
        v_shaped=SCHEDULES[schedule].v_shaped,
        layers_per_chunk=layers,
    )
    run = PlannedRun(
        shape, layout, split, schedule, 2, 4, 32, "bf16", training=ComputeSettings(recompute=recompute)
    )
    return replace(run, **changes)
