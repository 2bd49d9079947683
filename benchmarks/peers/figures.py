"""Rounds of figures -> rows of the report, and the best peer of each layout beside megalite."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.peers.contender import Contender, Figures, PeerLayout

# float32 sums in another order; a wrong label, weight, clipping or learning rate is far beyond it.
LOSS_RTOL = 2e-5

Round = Mapping[str, Figures]
Cases = Mapping[PeerLayout, Sequence[Contender]]


def check_losses(cases: Cases, found: Mapping[PeerLayout, Round]) -> None:
    """Raise ValueError where a contender's losses are not those of megalite's first on the same sequences."""
    every = [(layout, each) for layout, contenders in cases.items() for each in contenders]
    expected: dict[tuple[int, int], tuple[float, ...]] = {}
    for layout, each in every:
        if each.ours:
            expected.setdefault((layout.sequences, layout.length), found[layout][each.name].losses)
    other = {
        f"{layout.name}, {each.name}": found[layout][each.name].losses
        for layout, each in every
        if not _equal(found[layout][each.name].losses, expected[layout.sequences, layout.length])
    }
    if other:
        raise ValueError(f"other work: the first losses of megalite are {[*expected.values()]}, but {other}")


def _equal(losses: Sequence[float], expected: Sequence[float]) -> bool:
    return all(
        abs(loss - wanted) <= LOSS_RTOL * abs(wanted) for loss, wanted in zip(losses, expected, strict=True)
    )


def rows_of(
    layout: PeerLayout, contenders: Sequence[Contender], rounds: Sequence[Round]
) -> list[dict[str, Any]]:
    """One row a contender. over_megalite: its seconds by those of megalite's first row, in the same round."""
    ours = next(each for each in contenders if each.ours)
    rows = []
    for each in contenders:
        figures = [found[each.name] for found in rounds]
        seconds = statistics.median(one.seconds for one in figures)
        rows.append(
            {
                "layout": layout.name,
                "contender": each.name,
                "seconds": round(seconds, 3),
                "tokens_per_second": round(layout.tokens / seconds),
                **_ratio(
                    "over_megalite", [found[each.name].seconds / found[ours.name].seconds for found in rounds]
                ),
                "peak_mib": round(statistics.median(one.peak_mib for one in figures)),
                "first_step_seconds": round(statistics.median(one.first_step_seconds for one in figures), 1),
                "save_seconds": _median(one.save_seconds for one in figures),
                "load_seconds": _median(one.load_seconds for one in figures),
                "round_seconds": [round(one.seconds, 4) for one in figures],
            }
        )
    return rows


def best_of(
    layout: PeerLayout, contenders: Sequence[Contender], rounds: Sequence[Round]
) -> list[dict[str, Any]]:
    """One row for each of megalite's: the fastest peer's seconds by ours, in the same round, and who is ahead."""

    def seconds(each: Contender) -> float:
        return statistics.median(found[each.name].seconds for found in rounds)

    peers = [each for each in contenders if not each.ours]
    best = min(peers, key=seconds)
    rows = []
    for each in contenders:
        if not each.ours:
            continue
        ratios = [found[best.name].seconds / found[each.name].seconds for found in rounds]
        rows.append(
            {
                "layout": layout.name,
                "megalite": each.name,
                "best_peer": best.name,
                **_ratio("peer_over_ours", ratios),
                "ahead": _ahead(best.name, ratios),
            }
        )
    return rows


def _median(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return round(statistics.median(known), 2) if known else None


def _ratio(name: str, ratios: Sequence[float]) -> dict[str, float]:
    return {
        name: round(statistics.median(ratios), 3),
        "low": round(min(ratios), 3),
        "high": round(max(ratios), 3),
    }


def _ahead(peer: str, ratios: Sequence[float]) -> str:
    name = peer if statistics.median(ratios) < 1 else "megalite"
    return name if min(ratios) > 1 or max(ratios) < 1 else f"{name}, not in every round"
