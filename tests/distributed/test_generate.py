"""Tokens over tensor- and pipeline-parallel ranks are one process's."""

from pathlib import Path

import pytest

from megalite.generation.engine import generate_ids, load_model
from megalite.generation.request import GREEDY, Sampling
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.unit.convert.exporting import lively_stage, save_stage

DRAWN = Sampling(1.5, top_k=40, top_p=0.9, seed=4)


def tokens(checkpoint: Path, layout: Layout, sampling: Sampling) -> list[int]:
    model = load_model(checkpoint, ParallelMesh.over_world(layout))
    return list(generate_ids(model, [5, 6, 7, 8], new_tokens=20, sampling=sampling))


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=3), Layout(pipeline=2, tensor=2)])
@pytest.mark.parametrize(
    ("shape", "sampling", "scale"),
    [
        (tiny_shape(tied=True), GREEDY, 12.0),
        (tiny_shape(), DRAWN, 5.0),
        (FAMILY_SHAPES["gpt2"], DRAWN, 5.0),
        (FAMILY_SHAPES["phi"], DRAWN, 5.0),
    ],
    ids=["llama, greedy", "llama, drawn", "gpt2, drawn", "phi, drawn"],
)
def test_tokens_are_those_of_one_process(ranks, tmp_path, layout, shape, sampling, scale):
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape, scale=scale))
    [alone] = ranks.run(tokens, world_size=1, checkpoint=checkpoint, layout=Layout(), sampling=sampling)
    assert len(set(alone)) > 3, "a model that repeats itself would hide a broken cache"
    for held in ranks.run(
        tokens, world_size=layout.world_size, checkpoint=checkpoint, layout=layout, sampling=sampling
    ):
        assert held == alone
