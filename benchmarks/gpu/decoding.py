"""Generation of the Llama of 1.1 billion parameters on one card, in bf16, beside transformers' own `generate`."""

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.training import MODEL, TINY, profiled
from megalite.generation.loaded import build_model
from megalite.generation.request import GREEDY, Request, Sampling
from megalite.generation.token_engine import TokenEngine
from megalite.model.kv_cache import CacheSize
from megalite.model.replica import Replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape

PROMPT, NEW_TOKENS, WARM_UP = 64, 64, 8
# Requests at a time, and how each of them chooses its tokens.
WAYS = ((1, GREEDY), (16, GREEDY), (16, Sampling(0.8, top_p=0.9, seed=1)))


def decoding(device: str, tokens: int = NEW_TOKENS) -> Iterator[dict[str, Any]]:
    """Yield a row for each of WAYS and of the peer's greedy ones: the time of a step, which gives each request a token.

    Megalite's rows have the launches and the device's time of one step too.
    """
    sizes = TINY if device == "cpu" else MODEL
    longest = PROMPT + WARM_UP + tokens + 8
    replica = _model(sizes, device, longest)
    for requests, sampling in WAYS:
        yield {"way": "megalite", "requests": requests} | _steps(replica, requests, sampling, tokens)
    del replica
    gc.collect()
    peer = _peer(sizes, device, longest)
    for requests in (1, 16):
        yield {"way": "transformers", "requests": requests} | _peers_steps(peer, requests, tokens)


def _model(sizes: dict[str, int], device: str, longest: int) -> Replica:
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    shape = ModelShape(**sizes, head_dim=head_dim, max_position_embeddings=longest)
    replica = build_model(shape, ParallelMesh.single(device), torch.bfloat16)
    with torch.no_grad():
        for parameter in replica.stage.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return replica


@torch.inference_mode()
def _steps(replica: Replica, requests: int, sampling: Sampling, tokens: int) -> dict[str, Any]:
    device = replica.mesh.device.type
    engine = TokenEngine(replica, CacheSize(requests, replica.shape.max_position_embeddings))
    for number in range(requests):
        prompt = tuple(range(number, number + PROMPT))
        engine.submit(number, Request(prompt, WARM_UP + tokens + 8, sampling, frozenset()))
    for _ in range(WARM_UP):
        engine.step()
    milliseconds = _mean_ms(engine.step, tokens, device)
    return {
        "sampling": "greedy" if sampling is GREEDY else "top_p",
        "ms": round(milliseconds, 3),
        "tokens_per_second": round(requests * 1e3 / milliseconds),
        "profile": profiled(engine.step, device),
    }


def _mean_ms(step: Callable[[], object], steps: int, device: str) -> float:
    """The milliseconds of one of several steps in a row."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - started) / steps * 1e3


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _peer(sizes: dict[str, int], device: str, longest: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, max_position_embeddings=longest, tie_word_embeddings=False)
    config.eos_token_id, config.pad_token_id = None, 0
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@torch.inference_mode()
def _peers_steps(peer: Any, requests: int, tokens: int) -> dict[str, Any]:
    device = peer.device.type
    ids = torch.arange(PROMPT, device=device).repeat(requests, 1)

    def generate(new: int) -> float:
        _wait(device)
        started = time.perf_counter()
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        _wait(device)
        return time.perf_counter() - started

    generate(WARM_UP)
    milliseconds = (generate(WARM_UP + tokens) - generate(WARM_UP)) / tokens * 1e3
    return {
        "sampling": "greedy",
        "ms": round(milliseconds, 3),
        "tokens_per_second": round(requests * 1e3 / milliseconds),
    }
