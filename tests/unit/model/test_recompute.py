"""Which layers are recomputed, and what the forward of a model with such layers keeps."""

import pytest
import torch
from torch import Tensor

from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.stages import pipeline_split
from tests.support.options import Recompute, options_of
from tests.support.tiny import tiny_batch, tiny_shape


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Recompute("full"), "ffffff"),
        (Recompute("selective", layers=2), "ss----"),
        (Recompute("full", layers=9), "ffffff"),
        (Recompute("full", ratio=0.5), "-f-f-f"),
        (Recompute("full", ratio=0.3), "--f--f"),
        (Recompute("full", ratio=1.0), "ffffff"),
        (Recompute("full", ratio=0.7), "-fffff"),
        (Recompute(), "------"),
    ],
)
def test_which_layers_of_a_chunk_are_recomputed(how, expected):
    assert (
        "".join(
            {"none": "-"}.get(mode := options_of(recompute=how).recompute_of(place, 6), mode[0])
            for place in range(6)
        )
        == expected
    )


def _activations(recompute: Recompute) -> int:
    """Bytes that the forward of one micro batch keeps, weights apart; inputs of regions are counted by hand."""
    shape = tiny_shape()
    stage = build_replica(
        shape, ParallelMesh.single(), pipeline_split(4), options_of(recompute=recompute), seed=1
    ).stage
    own = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    batch = tiny_batch(shape, 2)
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        stage.whole.decode(batch.input_ids, batch.position_ids)
    return sum(size for size, _ in kept.values())


def test_what_forward_keeps_shrinks_with_what_is_recomputed():
    sizes = [
        _activations(how)
        for how in (Recompute(), Recompute("selective"), Recompute("full", ratio=0.5), Recompute("full"))
    ]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    half, full, none = sizes[2], sizes[3], sizes[0]
    assert abs((none - half) - (half - full)) < 0.1 * none
