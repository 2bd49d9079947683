"""The layers of each pipeline stage: pure arithmetic, for all small sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.topology.stages import balanced_split, pipeline_split
from tests.support import reported_faults as faults
from tests.support.museum import exhibit


@given(st.integers(0, 200), st.integers(1, 40))
def test_a_balanced_split_covers_all_with_sizes_that_differ_by_one(total: int, parts: int) -> None:
    runs = balanced_split(total, parts)
    assert [item for run in runs for item in run] == list(range(total))
    sizes = [len(run) for run in runs]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@exhibit(
    "Megatron-LM#1304",
    also=("Megatron-LM#468", "torchtitan#963", "mlx-lm#1688"),
    subject="layouts",
    there="30 layers over 4 stages became 28: those beyond a whole multiple were dropped without a word",
    here="every layer stands on exactly one stage, whatever their numbers",
    fault=faults.LAYERS_THAT_DO_NOT_DIVIDE_ARE_LOST,
)
@given(st.integers(1, 130), st.data())
def test_every_layer_stands_on_exactly_one_stage(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    runs = pipeline_split(layers, stages).layers
    assert [layer for run in runs for layer in run] == list(range(layers))
    sizes = [len(run) for run in runs]
    assert len(sizes) == stages
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert pipeline_split(layers, stages, layers_per_chunk=sizes).layers == runs


def test_the_extra_layers_go_to_the_middle() -> None:
    assert [len(run) for run in pipeline_split(6, 4).layers] == [1, 2, 2, 1]
    assert [len(run) for run in pipeline_split(7, 3).layers] == [2, 3, 2]


@pytest.mark.parametrize(
    ("layers", "stages", "given_split"),
    [(4, 2, [1, 2]), (4, 2, [2, 3]), (4, 2, [4]), (4, 2, [4, 0]), (4, 2, [5, -1]), (4, 2, []), (4, 5, None)],
)
def test_a_split_that_drops_or_repeats_a_layer_is_refused(
    layers: int, stages: int, given_split: list[int] | None
) -> None:
    with pytest.raises(ValueError, match=r"not a split|cannot each have one"):
        pipeline_split(layers, stages, layers_per_chunk=given_split)


def test_a_given_split_is_taken() -> None:
    assert pipeline_split(6, 3, layers_per_chunk=[1, 3, 2]).layers == (range(0, 1), range(1, 4), range(4, 6))
