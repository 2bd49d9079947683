"""Rows with documents over context-parallel ranks: how equal the work is by each cut, and the attention's time by rank.

    python -m benchmarks.context_cut [--quick]

Work: causal scores of the busiest rank over the mean of all, mean and largest of 20 rows of 8192 positions with
documents of log-normal lengths (sigma 1.5). Time: the CPU seconds that each of 4 ranks takes for the forward and
backward of one layer's attention by gather, 8 heads of 64 with 4 key-value heads, one thread each, for 2 rows one by
one; "as trained" is the cut that training chooses for each.
"""

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.ranks import run_ranks
from megalite.data.batches.context_blocks import Cut, block_work, cut_rows
from megalite.ops.attention_form import AttentionForm
from megalite.ops.choice import ALL_COMPILED
from megalite.ops.documents import packed_cu_seqlens, row_cu_seqlens
from megalite.parallel.context import ContextRows
from megalite.parallel.context_attention import METHODS
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.context import cut_by_work, zig_zag

LENGTH, ROWS, TIMED, RANKS, ROUNDS = 8192, 20, 2, 4, 2
MEANS, CONTEXTS, COUNTS = (64, 256, 1024, 8192), (2, 4, 8, 16), (2, 4, 8, 16)
SIGMA = 1.5
ZIG_ZAG, AS_TRAINED = "zig-zag", "as trained"


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
        cuts.setdefault(ZIG_ZAG, []).append(imbalance(ids, zig_zag(ranks)))
        for count in COUNTS:
            work = block_work(ids, ranks * count, {None: 1}).tolist()
            cuts.setdefault(f"{count} blocks", []).append(imbalance(ids, cut_by_work(work, ranks)))
    return {"mean document": mean, "ranks": ranks} | {
        name: f"{np.mean(values):.2f} ({max(values):.2f})" for name, values in cuts.items()
    }


def attention_seconds(mean: int, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """The CPU seconds of this rank by each cut, of each of TIMED rows: the least of the rounds, which alternate."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = ParallelMesh.over_world(Layout(context=RANKS))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(1, TIMED + 1):
        ids = document_ids(LENGTH, mean, seed)
        cut = {name: ContextRows.of(1, LENGTH, mesh, table(ids, name)) for name in names}
        form = AttentionForm(documents=packed_cu_seqlens(row_cu_seqlens(torch.from_numpy(ids)[None]), LENGTH))
        times: dict[str, list[float]] = {name: [] for name in names}
        for name in [*names] * (rounds + 1):
            query, key, value = (
                torch.randn(1, LENGTH // RANKS, n, 64, requires_grad=True) for n in (8, 4, 4)
            )
            started = time.process_time()
            attended = METHODS["gather"](ALL_COMPILED, query, key, value, form=form, rows=cut[name])
            attended.sum().backward()
            times[name].append(time.process_time() - started)
        for name in names:
            seconds[name].append(min(times[name][1:]))
    return seconds


def table(ids: np.ndarray, name: str) -> torch.Tensor | None:
    """The block table of a row: as training has it, zig-zag's (None), or that of a number of blocks."""
    if name == AS_TRAINED:
        cuts = cut_rows(ids[None], RANKS, {None: 1})
        return None if cuts is None else torch.tensor(cuts).flatten(1)
    if name == ZIG_ZAG:
        return None
    work = block_work(ids, RANKS * int(name.split()[0]), {None: 1})
    return torch.tensor(cut_by_work(work.tolist(), RANKS)).view(1, -1)


def times(mean: int, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    found: list[dict[str, list[float]]] = run_ranks(attention_seconds, RANKS, mean, names, rounds)
    rows = []
    for name in names:
        of_rows = np.array([each[name] for each in found])
        # The ranks meet in every row.
        busiest, average = of_rows.max(axis=0).sum(), of_rows.mean(axis=0).sum()
        rows.append(
            {
                "mean document": mean,
                "cut": name,
                "busiest ms": round(1e3 * busiest),
                "mean ms": round(1e3 * average),
                "busiest / mean": round(busiest / average, 2),
                "of zig-zag": round(busiest / (rows[0]["busiest ms"] / 1e3), 2) if rows else 1.0,
            }
        )
    return rows


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
    means = (256,) if options.quick else (256, 2048, 100 * LENGTH)
    names = [ZIG_ZAG, "4 blocks", "8 blocks", AS_TRAINED]
    seconds = [row for mean in means for row in times(mean, names, rounds)]
    report.show(f"gather attention on {RANKS} ranks", seconds, {name: name for name in seconds[0]})
    setting = {
        "length": LENGTH,
        "sigma": SIGMA,
        "ms to cut 2**20 positions over 64": round(1e3 * cut_seconds(), 1),
    }
    report.write("context-cut", facts, setting, balances + seconds, options.results)


if __name__ == "__main__":
    main()
