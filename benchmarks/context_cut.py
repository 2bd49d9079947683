"""Rows with documents over context-parallel ranks: how equal the work is by each cut, and the attention's time by rank.

    python -m benchmarks.context_cut [--quick]

Work: causal scores of the busiest rank over the mean of all, mean and largest of 20 rows of 8192 positions with
documents of log-normal lengths (sigma 1.5). Time: the CPU seconds that each of 4 ranks takes for the forward and
backward of one layer's attention by gather, 8 heads of 64 with 4 key-value heads, one thread each.
"""

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.ranks import run_ranks
from megalite.data.batches.context_blocks import block_work
from megalite.ops.attention_form import AttentionForm
from megalite.ops.choice import ALL_COMPILED
from megalite.ops.documents import packed_cu_seqlens, row_cu_seqlens
from megalite.parallel.context import ContextRows
from megalite.parallel.context_attention import METHODS
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.context import cut_by_work, zig_zag

LENGTH, ROWS, RANKS, ROUNDS = 8192, 20, 4, 3
MEANS, CONTEXTS, COUNTS = (64, 256, 1024, 8192), (2, 4, 8, 16), (2, 4, 8, 16)
SIGMA = 1.5
Cut = tuple[tuple[int, ...], ...]


def document_ids(length: int, mean: int, seed: int) -> np.ndarray:
    """The documents of a row, [length] from 0."""
    draw = np.random.default_rng(seed)
    lengths = 1 + draw.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, length).astype(int)
    return np.searchsorted(lengths.cumsum(), np.arange(length), side="right")


def imbalance(ids: np.ndarray, cut: Cut) -> float:
    work = block_work(ids, sum(map(len, cut)), {None: 1})
    return float(max(work[list(own)].sum() for own in cut) * len(cut) / work.sum())


def balance(mean: int, ranks: int) -> dict[str, Any]:
    cuts: dict[str, list[float]] = {}
    for seed in range(ROWS):
        ids = document_ids(LENGTH, mean, seed)
        cuts.setdefault("contiguous", []).append(imbalance(ids, tuple((rank,) for rank in range(ranks))))
        cuts.setdefault("zig-zag", []).append(imbalance(ids, zig_zag(ranks)))
        for count in COUNTS:
            work = block_work(ids, ranks * count, {None: 1}).tolist()
            cuts.setdefault(f"{count} blocks", []).append(imbalance(ids, cut_by_work(work, ranks)))
    return {"mean document": mean, "ranks": ranks} | {
        name: f"{np.mean(values):.2f} ({max(values):.2f})" for name, values in cuts.items()
    }


def attention_seconds(mean: int, count: int, rounds: int) -> float:
    """The CPU seconds of this rank; count: blocks a rank, 0: zig-zag."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = ParallelMesh.over_world(Layout(context=RANKS))
    ids = document_ids(LENGTH, mean, 1)
    table = None
    if count:
        cut = cut_by_work(block_work(ids, RANKS * count, {None: 1}).tolist(), RANKS)
        table = torch.tensor(cut).view(1, -1)
    rows = ContextRows.of(1, LENGTH, mesh, table)
    form = AttentionForm(documents=packed_cu_seqlens(row_cu_seqlens(torch.from_numpy(ids)[None]), LENGTH))
    seconds = []
    for _ in range(rounds + 1):
        query, key, value = (torch.randn(1, LENGTH // RANKS, n, 64, requires_grad=True) for n in (8, 4, 4))
        started = time.process_time()
        METHODS["gather"](ALL_COMPILED, query, key, value, form=form, rows=rows).sum().backward()
        seconds.append(time.process_time() - started)
    return min(seconds[1:])


def times(mean: int, count: int, rounds: int) -> dict[str, Any]:
    seconds: Sequence[float] = run_ranks(attention_seconds, RANKS, mean, count, rounds)
    average = sum(seconds) / RANKS
    return {
        "mean document": mean,
        "cut": f"by work, {count} blocks" if count else "zig-zag",
        "busiest ms": round(1e3 * max(seconds)),
        "mean ms": round(1e3 * average),
        "busiest / mean": round(max(seconds) / average, 2),
    }


def cut_seconds() -> float:
    """The seconds to cut a row of 2**20 positions over 64 ranks."""
    ids = document_ids(2**20, 4096, 0)
    started = time.perf_counter()
    cut_by_work(block_work(ids, 64 * 16, {None: 1}).tolist(), 64)
    return time.perf_counter() - started


def main() -> None:
    options = report.arguments(__doc__)
    facts, rounds = report.machine(), 1 if options.quick else ROUNDS
    balances = [balance(*case) for case in product(MEANS, CONTEXTS)]
    report.show(
        "busiest rank / mean, mean and largest of 20 rows", balances, {name: name for name in balances[0]}
    )
    means, counts = ((256,), (0, 16)) if options.quick else ((256, 2048, 100 * LENGTH), (0, 2, 4, 8, 16))
    seconds = [times(mean, count, rounds) for mean, count in product(means, counts)]
    report.show(f"gather attention on {RANKS} ranks", seconds, {name: name for name in seconds[0]})
    setting = {
        "length": LENGTH,
        "sigma": SIGMA,
        "ms to cut 2**20 positions over 64": round(1e3 * cut_seconds(), 1),
    }
    report.write("context-cut", facts, setting, balances + seconds, options.results)


if __name__ == "__main__":
    main()
