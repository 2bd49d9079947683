"""A model or a cache that this machine cannot hold is refused before anything is loaded."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.convert.weight_source import WeightSource
from megalite.generation import layout_and_memory as memory
from megalite.generation.layout_and_memory import (
    cache_bytes,
    cache_problems,
    inference_layout,
    layout_problems,
    weight_bytes,
)
from megalite.generation.source import ModelSource
from megalite.topology.axes import Layout
from megalite.topology.parameters import model_parameters, parameter_count
from tests.support.mixture_configs import CONFIGS, shape_of
from tests.support.tiny import MIXTURE_SHAPES, tiny_shape

SOURCE = ModelSource(
    Path("m"), "huggingface", replace(tiny_shape(), max_position_embeddings=10**9), tokenizer=Path("m")
)
GIB = 2**30
MIXTURE = replace(MIXTURE_SHAPES["mixtral"], max_position_embeddings=320)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(memory, "total_memory_bytes", lambda: GIB)
    monkeypatch.setattr(memory, "has_accelerator", lambda: False)
    return monkeypatch


def problems(slots: int, tokens: int, dtype: str = "float32", copies: int = 1) -> list[str]:
    named = ("--max-requests", slots), ("--context-length", tokens)
    return [str(each) for each in cache_problems(SOURCE, dtype, *named, layout=Layout(context=copies))]


def test_the_larger_of_slots_and_tokens_is_named_with_the_largest_that_fits() -> None:
    weights = 4 * parameter_count(SOURCE.shape)
    one = cache_bytes(SOURCE, "float32")
    assert (
        one
        == 2 * 4 * SOURCE.shape.num_hidden_layers * SOURCE.shape.num_key_value_heads * SOURCE.shape.head_dim
    )
    most = (GIB - weights) // (16 * one)
    assert problems(16, most) == []
    [problem] = problems(16, 10**9)
    assert problem.startswith(
        "--context-length: 1,000,000,000 does not fit: the keys and values of 16 x 1,000,000,000"
    )
    assert problem.endswith(f"use at most {most:,}")
    [problem] = problems(16, most, copies=2)
    fewer = (GIB // 2 - weights) // (16 * one)
    assert f"for each of 2 copies; use at most {fewer:,}" in problem
    [problem] = problems(10**8, 16)
    assert problem.startswith("--max-requests: 100,000,000 does not fit")


@pytest.mark.parametrize("tokens", [1, 10**9], ids=["small cache", "larger cache"])
def test_weights_alone_are_named_as_the_model(machine: pytest.MonkeyPatch, tokens: int) -> None:
    machine.setattr(memory, "total_memory_bytes", lambda: parameter_count(SOURCE.shape))
    [problem] = problems(1, tokens)
    assert problem.startswith("MODEL: m does not fit: its weights need")
    assert problem.endswith("use a smaller model or an int8 export or --dtype bfloat16")
    [problem] = problems(1, tokens, "bfloat16")
    assert problem.endswith("use a smaller model or an int8 export")
    [problem] = problems(1, tokens, "bfloat16", copies=4)
    assert "for each of 4 copies; use fewer context or data ranks or a smaller model" in problem
    machine.setattr(memory, "has_accelerator", lambda: True)
    assert problems(1, 10**9) == []


def of_experts(**sizes: int) -> Layout:
    return inference_layout(Namespace(**{"pipeline": 1, "tensor": 1, "context": 1, "expert": 1, **sizes}))


@pytest.mark.parametrize(
    ("sizes", "shared"),
    [
        ({"tensor": 4, "expert": 4}, 1),
        ({"tensor": 4, "expert": 2}, 2),
        ({"context": 2, "tensor": 2, "expert": 2}, 2),
        ({"context": 2, "tensor": 2, "expert": 4, "data_parallel": 3}, 1),
        ({"context": 5, "expert": 5}, 1),
    ],
)
def test_context_and_tensor_ranks_have_one_copy_of_the_experts(sizes: dict[str, int], shared: int) -> None:
    layout = of_experts(**sizes)
    assert list(layout_problems(layout, replace(MIXTURE, num_attention_heads=4))) == []
    assert layout.expert_sizes == {"edp": layout.data, "ep": layout.expert, "etp": shared}
    whole, divided = (
        weight_bytes(ModelSource(Path("m"), "huggingface", MIXTURE, tokenizer=Path("m")), "float32", each)
        for each in (replace(layout, expert=1), layout)
    )
    experts = sum(part.numel for part in model_parameters(MIXTURE) if ".experts." in part.name)
    assert whole == 4 * parameter_count(MIXTURE)
    assert divided == whole - 4 * (experts - experts // layout.context)


@pytest.mark.parametrize(
    ("sizes", "message", "new"),
    [
        ({"tensor": 2, "expert": 3}, "--context 1 x --tensor 2 cannot divide", 2),
        ({"context": 4, "tensor": 2, "expert": 2}, "use 1 or 4 (", 1),
        ({"context": 8, "expert": 8}, "8 ranks cannot divide the 5 experts of a layer; use 1", 1),
        ({"tensor": 2, "expert": 10**6}, "use 1 or 2", 2),
    ],
)
def test_ranks_that_cannot_divide_the_experts_are_refused(
    sizes: dict[str, int], message: str, new: int
) -> None:
    longest = replace(MIXTURE, max_position_embeddings=10**6)
    [problem] = layout_problems(of_experts(**sizes), longest)
    assert message in str(problem) and problem.set == {"--expert": new}
    assert list(layout_problems(of_experts(**sizes | {"expert": new}), longest)) == []


def test_a_model_without_experts_is_refused_once() -> None:
    [problem] = layout_problems(of_experts(tensor=2, expert=2), SOURCE.shape)
    assert str(problem).startswith("--expert: 2 ranks divide experts, but the model has none; leave it out")


def test_dividing_experts_is_advised_where_context_ranks_have_copies(machine: pytest.MonkeyPatch) -> None:
    source = replace(SOURCE, shape=MIXTURE)
    machine.setattr(memory, "total_memory_bytes", lambda: 8 * parameter_count(MIXTURE) - 8)
    cache = ("--max-requests", 1), ("--context-length", 1)
    [problem] = cache_problems(source, "float32", *cache, layout=of_experts(context=2))
    assert "use fewer context or data ranks or --expert 2 or a smaller model" in str(problem)
    assert list(cache_problems(source, "float32", *cache, layout=of_experts(context=2, expert=2))) == []


@pytest.mark.parametrize("room", [1, 7, 40, 999])
@pytest.mark.parametrize(("slots", "tokens"), [(1, 4096), (50, 60), (4096, 2), (1000, 1000)])
def test_the_number_that_is_named_fits(
    machine: pytest.MonkeyPatch, room: int, slots: int, tokens: int
) -> None:
    """room: tokens beside the weights; fewer than the smaller of both ask for less of both."""
    machine.setattr(
        memory,
        "total_memory_bytes",
        lambda: 4 * parameter_count(SOURCE.shape) + room * cache_bytes(SOURCE, "float32"),
    )
    [problem] = problems(slots, tokens)
    if room < min(slots, tokens):
        assert problem.endswith("lower --max-requests and --context-length")
        return
    fits = int(problem.rpartition(" ")[2].replace(",", ""))
    assert fits == room // min(slots, tokens) > 0
    named = (fits, tokens) if problem.startswith("--max-requests") else (slots, fits)
    assert problems(*named) == []


def test_latent_attention_keeps_one_vector_a_token_on_each_tensor_rank() -> None:
    """DeepSeek-V3: 576 values a token and layer, where its keys and values are 128 heads of 192 + 192."""
    v3 = ModelSource(Path("m"), "huggingface", shape_of(CONFIGS["DeepSeek-V3"]), tokenizer=Path("m"))
    assert cache_bytes(v3, "bfloat16") == 61 * 576 * 2
    assert cache_bytes(v3, "bfloat16", 8) == 8 * 61 * 576 * 2
    adapted = replace(v3, adapters={"own": WeightSource(Path("a"), "huggingface", v3.shape)})
    for whole in (adapted, replace(v3, int8=True)):
        assert cache_bytes(whole, "bfloat16", 8) == 61 * 128 * (192 + 192) * 2
