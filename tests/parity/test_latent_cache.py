"""The compressed cache of latent attention: its size, and the numbers of the forward without a cache, in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.model.context import StepContext
from megalite.model.decode import empty_cache
from megalite.model.kv_cache import CachedStep, CacheSize, KeyValueCache, PromptSegment
from megalite.model.latent_attention import LatentSelfAttention
from megalite.model.options import ModelOptions
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from tests.support.parity import LAYOUT_RTOL, relative_error
from tests.support.tiny import MIXTURE_SHAPES

SHAPES = {
    "a vector for queries, yarn": MIXTURE_SHAPES["deepseek_v3"],
    "one query projection, biases": MIXTURE_SHAPES["deepseek_v2, one query projection, biases"],
    "windows and soft caps": replace(
        MIXTURE_SHAPES["deepseek_v3"], sliding_window=5, full_attention_every=2, attn_logit_softcapping=3.0
    ),
}
PROMPTS, NEW = (5, 9, 9), 4


def model(shape: ModelShape) -> Replica:
    split, options = pipeline_split(shape.num_hidden_layers), ModelOptions(dtype=torch.float64)
    replica = build_replica(shape, ParallelMesh.single(), split, options, seed=3)
    with torch.no_grad():
        for tensor in replica.stage.parameters():
            tensor.mul_(5)
    return replica


def run(replica: Replica, cache: KeyValueCache, rows: Tensor) -> list[Tensor]:
    """Return the logits of each row's last NEW tokens, of all rows at a time, behind prompts in two pieces."""
    chunk, found = replica.stage.whole, list[list[Tensor]]([] for _ in PROMPTS)

    def forward(step: CachedStep, ids: Tensor) -> Tensor:
        positions = torch.tensor([step.position_ids])
        return chunk.logits(chunk.decode(ids[None], positions, StepContext(cache=step)))[0]

    with torch.inference_mode():
        for start, stop in ((0, 3), (3, None)):
            segments = [
                PromptSegment(slot, start, (stop or count) - start, count)
                for slot, count in enumerate(PROMPTS)
            ]
            ids = torch.cat([rows[slot, start : stop or count] for slot, count in enumerate(PROMPTS)])
            forward(CachedStep(cache, segments=tuple(segments)), ids)
        cache.swap(0, 1, max(PROMPTS))
        order = [1, 0, 2]
        for new in range(NEW):
            lengths = [PROMPTS[row] + new for row in order]
            ids = torch.stack([rows[row, length] for row, length in zip(order, lengths, strict=True)])
            for row, logits in zip(order, forward(CachedStep(cache, tuple(lengths)), ids), strict=True):
                found[row].append(logits)
    return [torch.stack(each) for each in found]


def errors(replica: Replica, cache: KeyValueCache) -> list[float]:
    shape, chunk = replica.shape, replica.stage.whole
    rows = torch.randint(
        shape.vocab_size, (3, max(PROMPTS) + NEW), generator=torch.Generator().manual_seed(8)
    )
    with torch.no_grad():
        whole = chunk.logits(chunk.decode(rows, torch.arange(rows.shape[1]).expand(rows.shape)))
    pairs = zip(run(replica, cache, rows), PROMPTS, strict=True)
    return [
        relative_error(found, whole[row, count : count + NEW]) for row, (found, count) in enumerate(pairs)
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_have_the_logits_of_the_forward_without_a_cache(name: str) -> None:
    replica = model(SHAPES[name])
    cache = empty_cache(replica, CacheSize(3, 16))
    assert cache.compressed
    assert max(errors(replica, cache)) < LAYOUT_RTOL


def test_it_holds_the_vector_of_each_token_alone() -> None:
    shape = SHAPES["a vector for queries, yarn"]
    assert isinstance(shape, MixtureShape) and shape.latent is not None
    cache = empty_cache(model(shape), CacheSize(3, 16))
    width = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    assert [cache.of(layer).shape for layer in range(4)] == [(1, 3, 1, 16, width)] * 4


def test_a_matrix_of_another_head_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = model(SHAPES["a vector for queries, yarn"])
    own = LatentSelfAttention.matrices

    def of_another_head(self: LatentSelfAttention) -> tuple[Tensor, Tensor]:
        keys, values = own(self)
        return keys.roll(1, dims=0), values

    monkeypatch.setattr(LatentSelfAttention, "matrices", of_another_head)
    assert min(errors(replica, empty_cache(replica, CacheSize(3, 16)))) > 1e-3


def test_beside_adapters_of_its_matrix_keys_and_values_are_cached() -> None:
    replica = model(SHAPES["a vector for queries, yarn"])
    compressed = empty_cache(replica, CacheSize(3, 16))
    [linear] = [
        each for name, each in replica.stage.named_modules() if name.endswith("2.self_attn.kv_b_proj")
    ]
    linear.bank = torch.nn.Identity()
    cache = empty_cache(replica, CacheSize(3, 16))
    assert not cache.compressed and cache.of(0).shape == (2, 3, 8, 16, 10)
    with pytest.raises(AssertionError, match="compressed cache beside adapters"):
        errors(replica, compressed)
    linear.bank = None
    assert max(errors(replica, cache)) < LAYOUT_RTOL, "the other form of the cache"
