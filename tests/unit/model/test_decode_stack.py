"""The layers of a decode step in one compiled operator: to the bit what they compute one by one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.generation.engine import build_model
from megalite.model.adapters import add_banks
from megalite.model.decode import empty_cache
from megalite.model.decode_stack import DecodeStack
from megalite.model.kv_cache import CachedStep, KeyValueCache, PromptSegment, Room
from megalite.model.replica import Replica
from megalite.model.transformer import Chunk
from megalite.ops.int8 import quantise_rows
from megalite.parallel.int8 import Int8Linear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora, Prefix
from megalite.topology.shape import ModelShape
from tests.support.kernels import needs_library
from tests.support.tiny import FAMILY_SHAPES
from tests.unit.convert.exporting import lively_stage

pytestmark = needs_library
SLOTS, LENGTHS = 6, (3, 17, 0, 9, 9)
SHAPES = {
    name: FAMILY_SHAPES[name]
    for name in (
        "llama 3",
        "llama with biases",
        "mistral",
        "qwen2",
        "smollm3 with windows",
        "gpt2",
        "starcoder2",
    )
}
SHAPES["prefix"] = replace(SHAPES["llama 3"], adapter=Prefix(tokens=3))
# Norms elsewhere or in other forms, factors, norms of query and key, a share of each head rotated.
OTHERS = ("gemma", "gemma2", "olmo2", "granite", "qwen3", "gpt_neox", "phi", "gpt_neox, blocks in turn")


def _model(shape: ModelShape, dtype: torch.dtype = torch.float32, *, int8: bool = False) -> Replica:
    replica = build_model(shape, ParallelMesh.single(), dtype, int8=int8)
    lively = lively_stage(shape)
    given = lively.state_dict()
    with torch.no_grad():
        for name, parameter in replica.stage.named_parameters():
            parameter.copy_(given[name])
        for name, module in replica.stage.named_modules():
            if isinstance(module, Int8Linear):
                weight, scale = quantise_rows(given[f"{name}.weight"], torch.float32)
                module.weight.copy_(weight), module.scale.copy_(scale)
    return replica


def _filled(replica: Replica) -> KeyValueCache:
    """Return a cache of random keys and values, equal at each call."""
    cache = empty_cache(replica, Room(SLOTS, 24))
    generator = torch.Generator().manual_seed(2)
    for layer in range(replica.shape.num_hidden_layers):
        cache.of(layer).copy_(torch.randn(cache.of(layer).shape, generator=generator))
    return cache


@torch.inference_mode()
def _decode(replica: Replica, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, list[Tensor]]:
    """Return the hidden states [1, n, H] of one new token behind each of the lengths, and the buffers behind it."""
    cache = _filled(replica)
    step = CachedStep(cache, lengths)
    input_ids = torch.arange(len(lengths)).unsqueeze(0) + 2
    hidden = replica.stage.whole.decode(input_ids, torch.tensor([step.position_ids]), cache=step)
    return hidden, [cache.of(layer) for layer in range(replica.shape.num_hidden_layers)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of a stack."""
    seen: list[int] = []
    call = DecodeStack.__call__

    def counted(self: DecodeStack, hidden_states: Tensor, *others: Any) -> Tensor:
        seen.append(hidden_states.shape[1])
        return call(self, hidden_states, *others)

    monkeypatch.setattr(DecodeStack, "__call__", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_layers_one_by_one(
    monkeypatch: pytest.MonkeyPatch, calls: list[int], name: str, int8: bool, dtype: torch.dtype
) -> None:
    replica = _model(SHAPES[name], dtype, int8=int8)
    together, caches = _decode(replica)
    assert calls == [len(LENGTHS)]
    monkeypatch.setattr(Chunk, "decode_stack", None)
    one_by_one, expected = _decode(replica)
    assert torch.equal(together, one_by_one)
    assert all(map(torch.equal, caches, expected))
    assert not torch.equal(caches[-1], _filled(replica).of(len(caches) - 1))


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_run_one_by_one(calls: list[int], name: str) -> None:
    _decode(_model(FAMILY_SHAPES[name]))
    assert not calls


def _with_adapters(replica: Replica) -> None:
    add_banks(replica, {"a": Lora(rank=2, alpha=4.0, targets=("o_proj",))})


def _by_plain_torch(replica: Replica) -> None:
    """Operators by plain torch, as on a machine without the library."""
    replica.stage.whole.ops = type(replica.stage.whole.ops)()


@pytest.mark.parametrize("change", [_with_adapters, _by_plain_torch])
def test_what_changes_a_layer_switches_it_off(calls: list[int], change: Callable[[Replica], None]) -> None:
    replica = _model(SHAPES["llama 3"])
    change(replica)
    _decode(replica)
    assert not calls


def test_it_is_for_few_new_tokens_alone(calls: list[int]) -> None:
    replica = _model(SHAPES["llama 3"], torch.bfloat16)
    cache = empty_cache(replica, Room(16, 24))
    ids = torch.ones(1, 9, dtype=torch.int64)
    with torch.inference_mode():
        replica.stage.whole.decode(ids, torch.zeros_like(ids), cache=CachedStep(cache, (1,) * 9))
        step = CachedStep(cache, (1, 1), (PromptSegment(2, 0, 3, 3),))
        replica.stage.whole.decode(ids[:, :5], torch.zeros_like(ids[:, :5]), cache=step)
    assert not calls
    replica.stage.whole.decode(ids[:, :2], torch.zeros_like(ids[:, :2]), cache=CachedStep(cache, (1, 1)))
    assert not calls, "gradients are recorded"


def test_wrong_tensors_are_refused() -> None:
    stack = DecodeStack.of(SHAPES["llama 3"], *_of_chunk(_model(SHAPES["llama 3"])))
    assert stack is not None
    stack._tensors.pop()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="no tensor for the MLP's output"):
        _run(stack)
    other = DecodeStack.of(SHAPES["llama 3"], *_of_chunk(_model(SHAPES["llama 3"])))
    assert other is not None
    other._tensors[1] = other._tensors[1].t().contiguous()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="the weight of query, key and value"):
        _run(other)


def _of_chunk(replica: Replica) -> tuple[Any, Any]:
    return tuple(replica.stage.whole.layers), replica.stage.whole.ops


def _run(stack: DecodeStack) -> Tensor:
    shape = SHAPES["llama 3"]
    replica = _model(shape)
    step = CachedStep(_filled(replica), LENGTHS)
    rotations = replica.stage.rotary(torch.tensor([step.position_ids]))
    return stack(torch.zeros(1, len(LENGTHS), shape.hidden_size), step, rotations)
