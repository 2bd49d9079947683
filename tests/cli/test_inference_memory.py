"""The memory that a command with a model names when a card has none left, and the flags that lower it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from megalite.cli.generate import generation_memory
from megalite.cli.generate_run import GenerationJob
from megalite.cli.inference_memory import InferenceMemory
from megalite.cli.local_ranks import on_local_ranks
from megalite.config.output.summary import memory_text
from megalite.errors import MemoryExhausted
from megalite.generation.layout_and_memory import cache_bytes
from megalite.generation.request import Request, Sampling
from megalite.generation.request_file import FileRequest
from megalite.generation.source import ModelSource
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.parameters import parameter_count
from tests.support.tiny import tiny_shape

SOURCE = ModelSource(Path("m"), "huggingface", replace(tiny_shape(), vocab_size=10**6), tokenizer=Path("m"))
CARD = torch.device("cuda")


def lines(memory: InferenceMemory) -> list[str]:
    return memory.lines(CARD)


def test_weights_and_cache_are_those_of_one_rank() -> None:
    cache = ("--max-requests", 16), ("--context-length", 4096)
    kinds, remedies = lines(InferenceMemory(SOURCE, Layout(), "float32", *cache))
    weights = memory_text(4 * parameter_count(SOURCE.shape))
    keys = memory_text(16 * 4096 * cache_bytes(SOURCE, "float32"))
    assert kinds == (
        f"this rank needs by estimate: weights {weights} in float32, keys and values of 16 x 4,096 tokens {keys}, and "
        "activations"
    )
    flags = ["--max-requests 8", "--context-length 2048", "--tensor 2", "--dtype bfloat16"]
    assert (
        remedies
        == f"to lower it: {', or '.join(flags)}, or an int8 export (megalite convert export --quantise int8)"
    )
    [halved, fewer] = lines(InferenceMemory(SOURCE, Layout(tensor=2), "bfloat16", *cache))
    assert (
        halved != kinds and "in bfloat16" in halved and "--dtype" not in fewer and "--tensor 2" not in fewer
    )


def test_what_cannot_be_lowered_is_not_advised() -> None:
    int8 = replace(SOURCE, int8=True)
    one = ("--batch-size", 1), ("--window", 64)
    kinds, remedies = lines(InferenceMemory(int8, Layout(), "bfloat16", *one, cached=False))
    assert "in int8, and activations" in kinds and "keys and values" not in kinds
    assert remedies.startswith("to lower it: --window 32") and "int8 export" not in remedies


@pytest.mark.parametrize(
    ("task", "prompt", "tokens", "advice"),
    [
        ("prompt", 6000, 100, "a shorter prompt"),
        ("prompt", 20, 100, "--tokens 50"),
        ("prompt", 20, 1, "a shorter prompt"),
        ("batch", 6000, 100, "--max-requests 2, or a shorter prompt"),
        ("batch", 20, 100, "--max-requests 2, or --tokens 50"),
        ("chat", 0, 8192, "use a smaller model"),
    ],
)
def test_the_advice_never_asks_for_more_tokens(
    task: Literal["prompt", "batch", "chat"], prompt: int, tokens: int, advice: str
) -> None:
    request = Request((0,) * prompt, tokens, Sampling(), frozenset())
    source = replace(SOURCE, int8=True)
    job = GenerationJob(
        task,
        source,
        Layout(tensor=SOURCE.shape.num_attention_heads),
        "bfloat16",
        request,
        file=(FileRequest(1, None, request),) * 4,
    )
    assert lines(generation_memory(job))[1] == f"to lower it: {advice}"


@pytest.mark.parametrize(("free", "advised"), [(0, True), (9, False)])
def test_the_flags_are_advised_for_a_full_card_alone(
    monkeypatch: pytest.MonkeyPatch, free: int, advised: bool
) -> None:
    module = SimpleNamespace(mem_get_info=lambda _: (free, 10), get_device_name=lambda _: "card")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr("megalite.monitor.memory.device_memory", lambda _: None)
    monkeypatch.setattr("megalite.parallel.device.local_device", lambda *_: CARD)

    def work(request: str, mesh: ParallelMesh) -> int:
        raise RuntimeError(request)

    cache = ("--max-requests", 16), ("--context-length", 4096)
    memory = InferenceMemory(SOURCE, Layout(), "float32", *cache)
    with pytest.raises(MemoryExhausted) as exhausted:
        on_local_ranks(Layout(), work, "CUDA error: out of memory", name="x", preload=[], memory=memory)
    assert ("--max-requests 8" in str(exhausted.value)) == advised
