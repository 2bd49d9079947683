"""Generation with the 17M Llama of the other benchmarks: 16 requests at once against one by one, and transformers.

    python -m benchmarks.generation [--quick] [--threads N]

One process, float32, greedy, prompts of 16 to 96 tokens. Each way runs in turn, ROUNDS times; the figure is
the fastest round. "decode step": one token of one request, of that model and of one of 110M, in runs of TOGETHER steps.
"products": megalite's products of one token with every weight matrix, nothing else. "torch's products": the same by
torch. "read": one sum over all weights, which reads each of them once.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import report
from benchmarks.workload import SHAPE
from megalite.generation.loaded import build_model
from megalite.generation.request import GREEDY, Request
from megalite.generation.token_engine import TokenEngine
from megalite.model.kv_cache import CacheSize
from megalite.model.replica import Replica
from megalite.model.stages import initialise
from megalite.ops.linear import few_rows_linear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape

CLIENTS, NEW_TOKENS, THREADS, ROUNDS, TOGETHER = 16, 64, 2, 5, 8
COLUMNS = {name: name for name in ("way", "clients", "tokens/s", "against one by one")}
STEP_COLUMNS = {name: name for name in ("model", "part", "ms", "against the read")}
PRODUCT_COLUMNS = {name: name for name in ("rows", "megalite, ms", "torch, ms", "ratio")}
# Its weights outgrow the caches of a processor.
LARGER = replace(
    SHAPE,
    vocab_size=32768,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
)


def requests(new_tokens: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    lengths = [16 + 80 * number // (CLIENTS - 1) for number in range(CLIENTS)]
    prompts = (torch.randint(SHAPE.vocab_size, (length,), generator=generator).tolist() for length in lengths)
    return [Request(tuple(prompt), new_tokens, GREEDY, frozenset()) for prompt in prompts]


def model(shape: ModelShape = SHAPE) -> Replica:
    replica = build_model(shape, ParallelMesh.single())
    initialise(replica, seed=1)
    return replica


def run_engine(replica: Replica, given: list[Request], slots: int) -> None:
    engine = TokenEngine(replica, CacheSize(slots, SHAPE.max_position_embeddings))
    for number, request in enumerate(given):
        engine.submit(number, request)
    found = 0
    while engine.has_work:
        found += len(engine.step())
    assert found == sum(request.max_tokens for request in given)


def peer() -> LlamaForCausalLM:
    """transformers' own model of the same sizes, with random weights."""
    config = LlamaConfig(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.num_hidden_layers,
        num_attention_heads=SHAPE.num_attention_heads,
        max_position_embeddings=SHAPE.max_position_embeddings,
        tie_word_embeddings=SHAPE.tie_word_embeddings,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def run_peer(theirs: LlamaForCausalLM, given: list[Request], together: int) -> None:
    """Generate `together` requests at a time, padded on the left to the longest of them."""
    for first in range(0, len(given), together):
        rows = given[first : first + together]
        longest = max(len(row.prompt_ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, longest - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            mask[place, longest - len(row.prompt_ids) :] = 1
        new = rows[0].max_tokens
        theirs.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)


def fastest(run: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of several runs."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def mean_of_runs(run: Callable[[], Any]) -> float:
    """Seconds of one of TOGETHER runs in a row, as the steps of a generation follow each other."""
    started = time.perf_counter()
    for _ in range(TOGETHER):
        run()
    return (time.perf_counter() - started) / TOGETHER


def throughput(replica: Replica, new_tokens: int, rounds: int) -> list[dict[str, Any]]:
    given, theirs = requests(new_tokens), peer()
    ways = {
        ("megalite", 1): lambda: run_engine(replica, given, 1),
        ("megalite", CLIENTS): lambda: run_engine(replica, given, CLIENTS),
        ("transformers", 1): lambda: run_peer(theirs, given, 1),
        ("transformers", CLIENTS): lambda: run_peer(theirs, given, CLIENTS),
    }
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for key, way in ways.items():
            seconds[key] = min(seconds[key], fastest(way, 1))
    return [
        {
            "way": name,
            "clients": clients,
            "tokens/s": round(CLIENTS * new_tokens / taken),
            "against one by one": round(seconds[name, 1] / taken, 2),
        }
        for (name, clients), taken in seconds.items()
    ]


@torch.inference_mode()
def decode_step(replica: Replica, rounds: int) -> list[dict[str, Any]]:
    engine = TokenEngine(replica, CacheSize(1, replica.shape.max_position_embeddings))
    engine.submit(0, Request(tuple(range(64)), 150, GREEDY, frozenset()))
    for _ in range(5):
        engine.step()
    matrices = [each for each in replica.stage.parameters() if each.dim() == 2]
    inputs = [torch.randn(1, 1, each.shape[1]) for each in matrices]
    whole = torch.cat([each.flatten() for each in replica.stage.parameters()])

    pairs = list(zip(inputs, matrices, strict=True))
    parts = {
        "decode step": engine.step,
        "products": partial(_each, few_rows_linear, pairs),
        "torch's products": partial(_each, F.linear, pairs),
        "read": whole.sum,
    }
    seconds = dict.fromkeys(parts, float("inf"))
    for _ in range(3 * rounds):  # of 3 * ROUNDS * TOGETHER steps at most, which the request has
        for name, part in parts.items():
            seconds[name] = min(seconds[name], mean_of_runs(part))
    return [
        {
            "model": f"{whole.numel() / 1e6:.0f}M",
            "part": name,
            "ms": round(1e3 * taken, 2),
            "against the read": round(taken / seconds["read"], 2),
        }
        for name, taken in seconds.items()
    ]


@torch.inference_mode()
def products(replica: Replica, rounds: int) -> list[dict[str, Any]]:
    """The products of a few rows with every weight matrix in turn, by megalite's operator and by torch."""
    matrices = [each for each in replica.stage.parameters() if each.dim() == 2]
    found = []
    for rows in (1, 2, 4, 8, 16):
        inputs = [torch.randn(1, rows, each.shape[1]) for each in matrices]
        pairs = list(zip(inputs, matrices, strict=True))
        ways = {"megalite": few_rows_linear, "torch": F.linear}
        seconds = dict.fromkeys(ways, float("inf"))
        for _ in range(10 * rounds):
            for name, product in ways.items():
                seconds[name] = min(seconds[name], fastest(partial(_each, product, pairs), 1))
        found.append(
            {
                "rows": rows,
                **{f"{name}, ms": round(1e3 * taken, 2) for name, taken in seconds.items()},
                "ratio": round(seconds["torch"] / seconds["megalite"], 2),
            }
        )
    return found


def _each(product: Callable[..., Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for pair in pairs:
        product(*pair)


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=THREADS, help="threads of torch (2)")
    options = report.arguments_of(parser)
    torch.set_num_threads(options.threads)
    facts = report.machine()
    rounds, new_tokens = (1, 8) if options.quick else (ROUNDS, NEW_TOKENS)
    replica = model()
    rows = throughput(replica, new_tokens, rounds)
    report.show("tokens a second", rows, COLUMNS)
    steps = decode_step(replica, rounds) + decode_step(model(LARGER), rounds)
    report.show("one token of one request", steps, STEP_COLUMNS)
    few_rows = products(replica, rounds)
    report.show("the products of a few rows with all weights", few_rows, PRODUCT_COLUMNS)
    settings = {
        "threads": options.threads,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "step": steps,
        "products": few_rows,
    }
    report.write("generation", facts, settings, rows, options.results)


if __name__ == "__main__":
    main()
