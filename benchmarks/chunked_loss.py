"""The head and its loss in chunks of tokens against whole logits: the peak of memory they add, and their time.

    python -m benchmarks.chunked_loss [--quick]

Losses of hidden states in float32 and the gradients of hidden states and of the head's weight, one process for each
row, two threads. Beside both gradients a chunk keeps its own logits only.
"""

import multiprocessing
import os
import resource
import time
from typing import Any

import torch

from benchmarks import report
from megalite.launcher.process import keep_freed_memory
from megalite.ops import extension
from megalite.ops.cross_entropy import COMPILED_CROSS_ENTROPY, TORCH_CROSS_ENTROPY
from megalite.parallel.cross_entropy import (
    ChunkedHead,
    LossTerms,
    VocabularyShard,
    chunked_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megalite.parallel.mesh import ALONE

TOKENS, HIDDEN, VOCABULARY, THREADS, ROUNDS = 2048, 512, 32000, 2, 3
COLUMNS = {name: name for name in ("chunk", "form", "peak MB", "seconds")}


def _once(hidden_states: torch.Tensor, weight: torch.Tensor, chunk: int, fused: bool) -> None:
    labels = torch.randint(VOCABULARY, hidden_states.shape[:2])
    shard = VocabularyShard(
        range(VOCABULARY), ALONE, COMPILED_CROSS_ENTROPY if fused else TORCH_CROSS_ENTROPY
    )
    tokens = (labels, torch.ones(labels.shape), shard, LossTerms(VOCABULARY))
    if chunk:
        losses = chunked_cross_entropy(hidden_states, ChunkedHead(weight, None, chunk), *tokens)
    else:
        losses = vocab_parallel_cross_entropy(hidden_states @ weight.t(), *tokens)
    torch.autograd.grad(losses.sum(), (hidden_states, weight))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _measure(case: tuple[int, bool, int]) -> dict[str, Any]:
    chunk, fused, rounds = case
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    # Logits of deviation 1: far wider ones have subnormal probabilities, which products crawl over.
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(HIDDEN**-0.5).requires_grad_()
    # A first run outside the measurement, because libraries allocate memory on first use.
    _once(torch.randn(1, 8, HIDDEN, requires_grad=True), weight, min(chunk, 8), fused)
    hidden_states = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    before, seconds = _peak_bytes(), []
    for _ in range(rounds):
        started = time.perf_counter()
        _once(hidden_states, weight, chunk, fused)
        seconds.append(time.perf_counter() - started)
    return {
        "chunk": chunk or "all tokens",
        "form": "fused" if fused else "plain",
        "peak MB": round((_peak_bytes() - before) / 1e6),
        "seconds": round(sorted(seconds)[len(seconds) // 2], 2),
    }


def main() -> None:
    options = report.arguments(__doc__)
    if complaint := extension.why_not("cpu"):
        raise SystemExit(f"no compiled operators here: {complaint}")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as a run has it: threads that spin share cores badly
    facts = report.machine()
    rounds = 1 if options.quick else ROUNDS
    rows = []
    for chunk in (0, 1024, 256):
        for fused in (False, True):
            # A process of its own, since a peak never falls.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(_measure, ((chunk, fused, rounds),)))
    setting = {"tokens": TOKENS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "threads": THREADS}
    report.show(f"{TOKENS} tokens, {VOCABULARY} ids, {THREADS} threads", rows, COLUMNS)
    report.write("chunked-loss", facts, setting, rows, options.results)


if __name__ == "__main__":
    main()
