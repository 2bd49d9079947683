"""Where a model drops values: only in training, at every site, differently on every layer, step and rank."""

from dataclasses import replace

import pytest
import torch

from megalite.model.dropout import DropoutContext, DropoutSites, LayerMasks, dropped_levels
from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.ops.counter import MASK_LEVELS
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.parallel.step_batch import EVALUATION, TRAINING, ForwardMode
from megalite.topology.stages import pipeline_split
from tests.support.options import Dropout, options_of
from tests.support.tiny import tiny_batch, tiny_shape

SHAPE = tiny_shape()
OPTIONS = options_of(
    dropout=Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.4, adapter=0.5), dropout_seed=3
)
PLACES = DropoutContext(torch.tensor([4, 9]), 12)


def _sites(name: str = "layers.0", *, tensor: int = 1, rank: int = 0) -> DropoutSites:
    mesh = replace(ParallelMesh.single(), groups={"tp": RankGroup(tuple(range(tensor)), rank)})
    return DropoutSites(SHAPE, name, mesh, OPTIONS)


def _losses(stage: torch.nn.Module, step: int = 0, mode: ForwardMode = TRAINING) -> torch.Tensor:
    batch = tiny_batch(SHAPE, 2, step=step)
    return stage(batch.input_ids, batch=batch, mode=mode)


def test_values_are_dropped_in_training_alone():
    split = pipeline_split(SHAPE.num_hidden_layers)
    plain = build_replica(SHAPE, ParallelMesh.single(), split, seed=1).stage
    dropping = build_replica(SHAPE, ParallelMesh.single(), split, OPTIONS, seed=1).stage
    assert not torch.equal(_losses(dropping), _losses(plain))
    assert torch.equal(_losses(dropping, mode=EVALUATION), _losses(plain, mode=EVALUATION))


@pytest.mark.parametrize("tensor", [2, 4])
def test_shards_of_tensor_ranks_are_the_slices_of_the_whole_mask(tensor):
    whole = _sites()
    ranks = [_sites(tensor=tensor, rank=rank) for rank in range(tensor)]
    masks = [each.layer_masks(PLACES) for each in ranks]
    expected = whole.layer_masks(PLACES)
    assert torch.equal(torch.cat([mask.mlp.keep for mask in masks], dim=-1), expected.mlp.keep)
    heads = torch.cat([each.attention_mask(PLACES).draw(12, 12).keep for each in ranks], dim=1)
    assert torch.equal(heads, whole.attention_mask(PLACES).draw(12, 12).keep)
    for mask in masks:
        assert torch.equal(mask.attention_residual.keep, expected.attention_residual.keep)
        assert torch.equal(mask.mlp_residual.keep, expected.mlp_residual.keep)


def test_no_two_sites_have_the_same_mask():
    keeps = [_sites("embedding").embedding_mask(PLACES).keep]
    for layer in range(3):
        masks = _sites(f"layers.{layer}").layer_masks(PLACES)
        keeps += [masks.attention_residual.keep, masks.mlp_residual.keep]
    for index, one in enumerate(keeps):
        for other in keeps[index + 1 :]:
            assert not torch.equal(one, other)
    layers = [_sites(f"layers.{layer}").attention_mask(PLACES).draw(12, 12).keep for layer in range(2)]
    heads = torch.cat(layers, dim=1).unbind(1)
    assert len({tuple(head.flatten().tolist()) for head in heads}) == len(heads)


def test_another_step_drops_other_values():
    later = DropoutContext(PLACES.sample_indices + 2, PLACES.sequence_length)
    assert not torch.equal(_sites().layer_masks(PLACES).mlp.keep, _sites().layer_masks(later).mlp.keep)


def test_every_site_has_its_own_rate_and_the_scale_of_what_is_really_drawn():
    masks = _sites().layer_masks(PLACES)
    of_rate = {
        0.1: [_sites("embedding").embedding_mask(PLACES)],
        0.2: [masks.attention_residual, masks.mlp_residual],
        0.3: [masks.mlp],
        0.4: [masks.attention.draw(12, 12)],
        0.5: [masks.adapter_qkv, masks.adapter_o, masks.adapter_up, masks.adapter_down],
    }
    for rate, sites in of_rate.items():
        assert [site.scale for site in sites] == [
            MASK_LEVELS / (MASK_LEVELS - round(rate * MASK_LEVELS))
        ] * len(sites)
    assert [dropped_levels(rate) for rate in (1e-9, 0.5, 1 - 1e-9)] == [1, MASK_LEVELS // 2, MASK_LEVELS - 1]


def test_a_rate_of_zero_draws_nothing():
    assert (
        DropoutSites(SHAPE, "layers.0", ParallelMesh.single(), ModelOptions()).layer_masks(PLACES)
        == LayerMasks()
    )
