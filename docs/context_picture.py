"""The picture of docs/parallelism.md of a row with documents that 4 ranks share, cut zig-zag and by work."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from docs.drawing import BLUE, GREEN, LINE, ORANGE, PALE, RED, label, picture, rectangle
from megalite.data.batches.context_blocks import block_work
from megalite.topology.context import cut_by_work, zig_zag

RANKS, BLOCKS = 4, 8
DOCUMENTS = (100, 600, 1500, 300, 900, 150, 546)
"""Tokens of the documents of the row."""
IDS = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
KEYS = np.arange(len(IDS)) - np.searchsorted(IDS, IDS)
"""The keys before each position in its document."""
COLORS = (BLUE, GREEN, ORANGE, RED)
LEFT, UNIT, HEIGHT = 20.0, 0.2, 90.0


def context_picture() -> str:
    """Draw the keys that each position sees, in the color of its rank, for both cuts, and each rank's sum."""
    cuts = {
        "zig-zag, two blocks a rank": zig_zag(RANKS),
        f"by work, {BLOCKS} blocks a rank": cut_by_work(_work(RANKS * BLOCKS), RANKS),
    }
    parts, texts, y = list[str](), list[str](), 12.0
    for title, cut in cuts.items():
        work = _work(sum(map(len, cut)))
        shares = [sum(work[block] for block in own) * RANKS / sum(work) for own in cut]
        text = f"{title}: the busiest rank has {max(shares):.2f} of the mean work"
        texts.append(text)
        parts.append(label(LEFT, y + 14, text, bold=True))
        parts += _row(cut, len(IDS) // len(work), y + 26 + HEIGHT)
        for rank, share in enumerate(shares):
            parts.append(rectangle(LEFT + 120 * rank, y + 36 + HEIGHT, 14, 14, COLORS[rank]))
            parts.append(label(LEFT + 120 * rank + 20, y + 48 + HEIGHT, f"rank {rank}: {share:.2f}", size=12))
        y += HEIGHT + 72
    note = f"Across: {len(IDS)} positions in {len(DOCUMENTS)} documents. Up: the keys that a position sees."
    parts.append(label(LEFT, y + 10, note, size=11, color=PALE))
    title = f"A row with documents over {RANKS} ranks"
    return picture("context", 2 * LEFT + len(IDS) * UNIT, y + 24, title, "; ".join(texts), parts)


def _work(blocks: int) -> list[float]:
    work: list[float] = block_work(IDS, blocks, {None: 1}).tolist()
    return work


def _row(cut: tuple[tuple[int, ...], ...], length: int, base: float) -> Iterator[str]:
    """Draw each block as one shape for each of its documents."""
    scale = HEIGHT / max(DOCUMENTS)
    for rank, own in enumerate(cut):
        for first in (block * length for block in own):
            inner = range(first + 1, first + length)
            ends = [first, *(place for place in inner if not KEYS[place]), first + length]
            for start, stop in pairwise(ends):
                left, right = LEFT + start * UNIT, LEFT + stop * UNIT
                low, high = base - KEYS[start] * scale, base - KEYS[stop - 1] * scale
                points = (
                    f"{left:.1f},{base:g} {left:.1f},{low:.1f} {right:.1f},{high:.1f} {right:.1f},{base:g}"
                )
                yield f"<polygon points='{points}' fill='{COLORS[rank]}' stroke='{LINE}' stroke-width='0.5'/>"
