"""Cuts and parameters: the regions of all ranks tile every canonical tensor exactly once, in every layout."""

from collections import Counter
from itertools import product
from math import prod, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.topology.axes import Layout
from megalite.topology.parameters import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    canonical_tensors,
    model_parameters,
    parameter_count,
    stage_parameters,
)
from megalite.topology.place import RankPlace
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import Part, ShardSpec, TensorSlice, heads_fit, heads_held
from megalite.topology.stages import pipeline_split
from tests.support import reported_faults as faults
from tests.support.museum import exhibit


def shape_of(
    *, heads: int, shared: int, head_dim: int, layers: int, vocab: int, inner: int, tied: bool
) -> ModelShape:
    return ModelShape(
        vocab_size=vocab,
        hidden_size=heads * head_dim + 2,  # head_dim need not be hidden / heads
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelShape, int, int]:
    """A shape with a tensor and a pipeline size that it fits."""
    tp = draw(st.integers(1, 4))
    # Fewer key-value heads than ranks are shared by neighbours.
    shared = draw(st.sampled_from([each for each in range(1, 9) if each % tp == 0 or tp % each == 0]))
    shape = shape_of(
        heads=max(shared, tp) * draw(st.integers(1, 3)),
        shared=shared,
        head_dim=2 * draw(st.integers(1, 3)),
        layers=draw(st.integers(1, 5)),
        vocab=draw(st.integers(tp, 30)),
        inner=draw(st.integers(tp, 20)),
        tied=draw(st.booleans()),
    )
    return shape, tp, draw(st.integers(1, shape.num_hidden_layers))


def cells(region: TensorSlice) -> product:  # type: ignore[type-arg]
    return product(
        *(range(start, start + length) for start, length in zip(region.offsets, region.shape, strict=True))
    )


@settings(max_examples=40)
@given(models())
def test_every_element_is_held_counted_and_written(found: tuple[ModelShape, int, int]) -> None:
    """A copy holds an element once, but for what every tensor-parallel rank has whole, tied copies on two stages and
    heads that ranks share. One rank writes it, one of each copy counts it, with zeros on further ranks of a head."""
    shape, tp, stages = found
    layout, split = Layout(stages, 2, tp), pipeline_split(shape.num_hidden_layers, stages)
    held, counted, written = ({name: Counter() for name in canonical_tensors(shape)} for _ in range(3))
    holders, times = {}, {}
    for rank in range(layout.world_size):
        place = RankPlace(layout, rank)
        for turn, parameter in enumerate(stage_parameters(shape, split, place.at.pp)):
            spec = parameter.spec
            for part, region in place.slices(parameter):
                same = [each for each in range(tp) if spec.slice_of(part, each, tp) == region]
                holders[part.name] = 2 * len(same) * max(1, len(spec.stages))
                times[part.name] = 2 * (len(same) if place.is_shared(parameter, part) else 1)
                assert place.is_first_holder(parameter, part) == (place.at.tp == same[0])
                assert place.is_shared(parameter, part) == (spec.dim is not None and len(same) > 1)
                held[part.name].update(cells(region))
                counted[part.name].update(cells(region) if place.is_counted(parameter) else ())
                first = place.is_first_stage(parameter) and place.is_first_holder(parameter, part)
                written[part.name].update(cells(region) if first and place.writes(parameter, turn) else ())
    for name, full in canonical_tensors(shape).items():
        for counter, number in ((held, holders[name]), (counted, times[name]), (written, 1)):
            assert counter[name] == Counter(dict.fromkeys(product(*map(range, full)), number)), name


@settings(max_examples=40)
@given(models())
def test_a_local_shape_holds_its_slices_one_below_the_other(found: tuple[ModelShape, int, int]) -> None:
    shape, tp, _ = found
    for parameter in model_parameters(shape):
        spec = parameter.spec
        assert spec.local_shape(0, 1) == spec.full_shape
        total = 0
        for rank in range(tp):
            local, regions = spec.local_shape(rank, tp), [region for _, region in spec.slices(rank, tp)]
            assert prod(local) == sum(region.numel for region in regions)
            assert local[0] == sum(region.shape[0] for region in regions)
            assert all(region.shape[1:] == local[1:] for region in regions)
            total += prod(local)
        if spec.dim is None or not any(spec.is_shared(part, tp) for part in spec.parts):
            assert total == parameter.numel * (1 if spec.dim is not None else tp)


@exhibit(
    "Megatron-Bridge#1853",
    also=("Megatron-Bridge PR#5353", "ColossalAI#6167", "torchtitan#1136"),
    subject="tokenizers",
    there="a vocabulary that the ranks do not divide was padded, and the padding reached files, or was added twice",
    here="shards are uneven and nothing is padded",
    fault=faults.SHARDS_ARE_PADDED,
)
def test_an_uneven_cut_gives_the_first_ranks_more_and_pads_nothing() -> None:
    spec = ShardSpec((Part("a", (7, 3)), Part("b", (4, 3))), dim=0)
    assert [spec.local_shape(rank, 3) for rank in range(3)] == [(5, 3), (3, 3), (3, 3)]
    assert [region.offsets[0] for _, region in spec.slices(1, 3)] == [3, 2]
    columns = ShardSpec((Part("c", (3, 7)),), dim=1)
    assert [columns.local_shape(rank, 2) for rank in range(2)] == [(3, 4), (3, 3)]
    assert ShardSpec((Part("n", (5,)),)).local_shape(1, 2) == (5,)


def test_a_replica_of_a_cut_keeps_whole_heads_together() -> None:
    """Rank r's query rows are its heads' rows, and its key and value rows those of the heads that they share."""
    shape = shape_of(heads=8, shared=4, head_dim=6, layers=1, vocab=11, inner=9, tied=False)
    [qkv] = [each for each in model_parameters(shape) if each.name.endswith("qkv_proj.weight")]
    for rank in range(4):
        query, key, value = (region for _, region in qkv.spec.slices(rank, 4))
        assert (query.offsets[0], query.shape[0]) == (rank * 12, 12)
        assert (key.offsets[0], key.shape[0]) == (value.offsets[0], value.shape[0]) == (rank * 6, 6)


@pytest.mark.parametrize(("heads", "shared", "tp"), [(8, 2, 4), (8, 1, 8), (12, 2, 6), (8, 4, 2), (6, 6, 3)])
def test_query_heads_stay_with_their_key_value_head(heads: int, shared: int, tp: int) -> None:
    """Each rank's query heads attend to exactly the key-value heads that it holds, in the order of the repeat."""
    for rank in range(tp):
        query, key_value = heads_held(heads, rank, tp), heads_held(shared, rank, tp)
        group = len(query) // len(key_value)
        attended = [key_value[place // group] for place in range(len(query))]
        assert attended == [head // (heads // shared) for head in query]


def test_heads_that_ranks_can_neither_split_nor_share_are_refused() -> None:
    assert [heads_fit(4, size) for size in (1, 2, 3, 4, 6, 8)] == [True, True, False, True, False, True]
    with pytest.raises(ValueError, match="6 ranks cannot hold 4 heads evenly, nor share them: neither"):
        heads_held(4, 0, 6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_hold_the_model_and_tied_weights_twice(tied: bool, stages: int) -> None:
    shape = shape_of(heads=4, shared=2, head_dim=4, layers=4, vocab=11, inner=9, tied=tied)
    split = pipeline_split(4, stages)
    held = [[each.name for each in stage_parameters(shape, split, stage)] for stage in range(stages)]
    whole = [each.name for each in model_parameters(shape)]
    everything = Counter(name for names in held for name in names)
    assert set(everything) == set(whole)
    twice = {name for name, count in everything.items() if count > 1}
    assert twice == ({EMBEDDING} if tied and stages > 1 else set())
    assert held[0][0] == EMBEDDING
    assert held[-1][-1] == (HEAD if not tied else EMBEDDING if stages > 1 else FINAL_NORM)
    for stage in (0, stages - 1):
        [embedding] = [each for each in stage_parameters(shape, split, stage) if each.name == EMBEDDING] or [
            None
        ]
        if embedding is not None:
            assert embedding.spec.stages == ((0, stages - 1) if tied and stages > 1 else (0,))


def test_canonical_names_are_those_of_hugging_face() -> None:
    shape = shape_of(heads=4, shared=2, head_dim=4, layers=2, vocab=11, inner=9, tied=False)
    layer = [
        "input_layernorm",
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "post_attention_layernorm",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.v_proj",
    ]
    expected = [f"model.layers.{index}.{name}.weight" for index in range(2) for name in layer]
    assert sorted(canonical_tensors(shape)) == sorted([*expected, EMBEDDING, FINAL_NORM, HEAD])
    assert canonical_tensors(shape)["model.layers.1.self_attn.k_proj.weight"] == (8, 18)
    assert parameter_count(shape) == sum(map(prod, canonical_tensors(shape).values()))


def test_norms_do_not_decay_and_residual_projections_start_smaller() -> None:
    shape = shape_of(heads=4, shared=2, head_dim=4, layers=8, vocab=11, inner=9, tied=False)
    for parameter in model_parameters(shape):
        norm = "norm" in parameter.name
        assert parameter.decay is not norm
        residual = parameter.name.endswith(("o_proj.weight", "down_proj.weight"))
        assert parameter.std == (None if norm else 0.02 / sqrt(16) if residual else 0.02)
