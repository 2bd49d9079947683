"""The pictures of docs/learn/; their numbers come from the planner, the schedules and the learning rates.

python -m docs.pictures        # writes them too
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import SimpleNamespace

from docs.drawing import (
    BLUE,
    GREEN,
    GREY,
    LINE,
    ORANGE,
    PALE,
    RED,
    TEXT,
    arrow,
    label,
    picture,
    rectangle,
)
from docs.lessons import example_memory, zero_bytes
from megalite.planner.fit import memory_bands
from megalite.planner.memory import RankMemory
from megalite.topology.dtypes import PRECISIONS
from megalite.topology.learning_rate import DECAYS, LearningRate

GIB = 2**30
KINDS = {
    "weights": BLUE,
    "gradients": GREEN,
    "masters": ORANGE,
    "moments": RED,
    "activations": "#d8c7f5",
    "loss": "#f5c2e0",
    "buffers": GREY,
    "base": "#c9d1d9",
}
"""Kind of memory -> colour."""
NAMES = {"masters": "fp32 weights", "moments": "AdamW's moments", "loss": "logits", "base": "process"}


def lesson_pictures() -> dict[str, str]:
    """Return file name -> SVG."""
    drawn = {
        "data-parallel": data_parallel(),
        "tensor-parallel": tensor_parallel(),
        "sequence-parallel": sequence_parallel(),
        "accumulation": accumulation(),
        "zero": zero(),
        "recompute": recompute(),
        "memory": memory(),
        "learning-rate": learning_rate(),
        "precision": precision(),
        "lora": lora(),
        "nodes": nodes(),
        "windows": windows(),
        "batching": batching(),
    }
    return {f"learn/{name}.svg": svg for name, svg in drawn.items()}


def data_parallel(ranks: int = 4, sequences: int = 8) -> str:
    """Draw replicas that read their own sequences and share the mean of their gradients."""
    column, left, share = 128, 20, sequences // ranks
    width = left + ranks * column + 8
    parts = [
        label(
            left,
            24,
            f"One global batch of {sequences} sequences, {share} for each of {ranks} ranks",
            bold=True,
        )
    ]
    for rank in range(ranks):
        x = left + rank * column
        for place in range(share):
            parts.append(rectangle(x + place * 54, 38, 48, 22, BLUE))
            parts.append(
                label(x + place * 54 + 24, 54, f"s{rank * share + place + 1}", anchor="middle", size=11)
            )
        parts += [rectangle(x, 84, 106, 44, GREY), label(x + 53, 103, "whole model", anchor="middle")]
        parts.append(label(x + 53, 120, f"rank {rank}", anchor="middle", size=11, color=PALE))
        parts += _down(x + 53, 62, 82)
        parts += _down(x + 53, 130, 150)
    end = left + (ranks - 1) * column + 106
    parts.append(rectangle(left, 152, end - left, 28, GREEN))
    parts.append(
        label((left + end) / 2, 171, "all-reduce: every rank gets the same gradient", anchor="middle")
    )
    parts.append(
        label(
            left, 200, "Every rank applies the same update, so the replicas stay equal.", size=11, color=PALE
        )
    )
    text = (
        f"{ranks} ranks with whole models; each reads {share} sequences; an all-reduce averages the gradients"
    )
    return picture("data-parallel", width, 212, "Data parallelism", text, parts)


def tensor_parallel() -> str:
    """Draw an MLP whose first weight is cut by columns and whose second by rows, on two ranks."""
    parts = [
        label(16, 24, "An MLP on two ranks: first weight by columns, second by rows", bold=True),
        *_matrix(16, 76, 60, 60, [GREY], "X", "both ranks"),
        *_sign(88, 111, "x"),
        *_matrix(112, 76, 96, 60, [BLUE, GREEN], "A", "by columns"),
        *arrow(216, 106, 244),
        *_matrix(252, 76, 96, 60, [BLUE, GREEN], "GELU(X A)", "stays in parts"),
        *_sign(360, 111, "x"),
        *_matrix(384, 58, 60, 96, [BLUE, GREEN], "B", "by rows", rows=True),
        *arrow(452, 106, 480),
        *_matrix(488, 76, 60, 60, [BLUE], "Z of rank 0", "a partial sum"),
        *_sign(572, 111, "+"),
        *_matrix(596, 76, 60, 60, [GREEN], "Z of rank 1", "a partial sum"),
        *_sign(676, 111, "="),
        *_matrix(700, 76, 60, 60, [GREY], "Z", "all-reduce"),
        rectangle(16, 188, 14, 14, BLUE),
        label(36, 200, "rank 0", size=11),
        rectangle(92, 188, 14, 14, GREEN),
        label(112, 200, "rank 1", size=11),
        label(
            168,
            200,
            "The activation needs no communication: each rank has whole columns of X A.",
            size=11,
            color=PALE,
        ),
    ]
    return picture(
        "tensor-parallel",
        776,
        214,
        "Tensor parallelism of an MLP",
        "Z = GELU(X A) B: columns of A and rows of B lie on two ranks, and one all-reduce adds their products",
        parts,
    )


def sequence_parallel(tokens: int = 8) -> str:
    """Draw which tokens each of two ranks has between and inside the tensor-parallel regions."""
    stages = ("norm, dropout", "attention or MLP", "norm, dropout")
    joins = ("all-gather", "reduce-scatter")
    box, gap, left = 22, 86, 70
    column = tokens * box
    parts = [
        label(16, 24, f"{tokens} tokens of a sequence on two ranks of a tensor-parallel group", bold=True)
    ]
    for place, stage in enumerate(stages):
        x = left + place * (column + gap)
        parts.append(label(x + column / 2, 52, stage, anchor="middle", size=12))
        for rank, color in enumerate((BLUE, GREEN)):
            y = 64 + rank * 44
            if not place:
                parts.append(label(left - 10, y + 20, f"rank {rank}", anchor="end", size=12))
            for token in range(tokens):
                here = place == 1 or token * 2 // tokens == rank
                parts.append(rectangle(x + token * box, y, box - 2, 28, color if here else "#ffffff"))
                if here:
                    parts.append(
                        label(x + token * box + 10, y + 18, str(token + 1), anchor="middle", size=10)
                    )
        words = "all tokens, half of the heads" if place == 1 else "half of the tokens"
        parts.append(label(x + column / 2, 164, words, anchor="middle", size=11, color=PALE))
        if place:
            parts += arrow(x - gap + 6, 98, x - 8)
            parts.append(label(x - gap / 2, 126, joins[place - 1], anchor="middle", size=10, color=PALE))
    width = left + 3 * column + 2 * gap + 20
    text = "Each rank has half of the tokens outside, and all tokens with half of the heads inside"
    return picture("sequence-parallel", width, 180, "Sequence parallelism", text, parts)


def accumulation(micro_batches: int = 4) -> str:
    """Draw one step of several micro batches that ends in one update."""
    unit, left, y = 44, 20, 42
    parts = [label(left, 26, f"One step of {micro_batches} micro batches on one rank", bold=True)]
    for number in range(micro_batches):
        x = left + number * 3 * unit
        parts.append(rectangle(x, y, unit - 2, 30, BLUE))
        parts.append(label(x + unit / 2, y + 20, f"F{number + 1}", anchor="middle"))
        parts.append(rectangle(x + unit, y, 2 * unit - 4, 30, GREEN))
        parts.append(label(x + 2 * unit, y + 20, f"B{number + 1}", anchor="middle"))
        parts += _down(x + 2 * unit, y + 32, y + 52)
    end = left + micro_batches * 3 * unit
    parts.append(rectangle(left, y + 54, end - left - 4, 26, ORANGE))
    words = "sum of the gradients in fp32; divided by the tokens of the whole batch"
    parts.append(label((left + end) / 2, y + 72, words, anchor="middle", size=12))
    parts += arrow(end - 2, y + 67, end + 28)
    parts += [rectangle(end + 32, y + 50, 84, 34, RED), label(end + 74, y + 72, "update", anchor="middle")]
    text = f"{micro_batches} forwards and backwards add into one gradient, and one update follows"
    return picture("accumulation", end + 132, y + 96, "Gradient accumulation", text, parts)


def zero() -> str:
    """Draw the bytes of a parameter on each of eight ranks, by ZeRO stage."""
    rows = {f"ZeRO {stage}" if stage else "no ZeRO": zero_bytes(stage) for stage in range(4)}
    title = "Bytes of a parameter on each of 8 data-parallel ranks (bf16, AdamW)"
    return _bars("zero", title, rows, {row: sum(kinds.values()) for row, kinds in rows.items()})


def recompute() -> str:
    """Draw the memory of a rank of the example's run, by mode of recomputation."""
    modes = {mode: example_memory("--training.recompute", mode) for mode in ("none", "selective", "full")}
    title = "Memory of a rank of examples/pretrain/1b.toml by training.recompute, GiB"
    return _memories("recompute", title, modes)


def memory() -> str:
    """Draw the memory of models by size, as `megalite plan --table` counts it."""
    title = "Memory of a training on one card by size of model, GiB"
    return _memories(
        "memory", title, {band.name: band.memory for band in memory_bands() if band.name in BANDS}
    )


BANDS = ("125M", "350M", "1.3B", "2.7B")


def _memories(name: str, title: str, rows: Mapping[str, RankMemory]) -> str:
    """Draw the kinds of each row, and its peak: the kinds are not all at their largest at once."""
    kinds = {
        row: {kind: size / GIB for kind, size in memory.kinds.items() if kind in KINDS}
        for row, memory in rows.items()
    }
    return _bars(name, title, kinds, {row: memory.peak / GIB for row, memory in rows.items()})


def _bars(name: str, title: str, rows: Mapping[str, Mapping[str, float]], totals: Mapping[str, float]) -> str:
    """Draw a stacked bar for each row, its total behind it, and a legend of the kinds."""
    left, height, most = 90, 30, max(sum(row.values()) for row in rows.values())
    scale, parts, y = 500 / most, [label(16, 26, title, bold=True)], 44.0
    for row, kinds in rows.items():
        parts.append(label(left - 12, y + 16, row, anchor="end"))
        x = float(left)
        for kind, size in kinds.items():
            if size * scale >= 1:
                parts.append(rectangle(x, y, size * scale, height - 6, KINDS[kind]))
            if size * scale > 30:
                parts.append(label(x + size * scale / 2, y + 16, f"{size:.1f}", anchor="middle", size=11))
            x += size * scale
        parts.append(label(x + 8, y + 16, f"{totals[row]:.1f}", bold=True))
        y += height
    used = [kind for kind in KINDS if any(row.get(kind, 0) * scale >= 1 for row in rows.values())]
    x = float(left)
    for kind in used:
        words = NAMES.get(kind, kind)
        parts += [rectangle(x, y + 10, 14, 14, KINDS[kind]), label(x + 19, y + 22, words, size=11)]
        x += 32 + 6.8 * len(words)
    said = "; ".join(f"{row}: {total:.1f}" for row, total in totals.items())
    return picture(name, max(left + 570.0, x + 8), y + 38, title, said, parts)


def learning_rate(steps: int = 1000, warm_up: int = 100) -> str:
    """Draw every schedule of `optimizer.schedule` over a run, from the functions that the training calls."""
    left, top, width, height = 62, 52, 560, 170
    parts = [label(16, 24, f"Learning rate over {steps:,} steps, warm-up of {warm_up}", bold=True)]
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f"<path d='M {left} {y:g} h {width}' stroke='{LINE}' stroke-width='0.5'/>")
        parts.append(label(left - 8, y + 4, f"{share:g}", anchor="end", size=11))
    for step in range(0, steps + 1, steps // 4):
        parts.append(
            label(left + width * step / steps, top + height + 18, f"{step:,}", anchor="middle", size=11)
        )
    colors = dict(zip(DECAYS, ("#0969da", "#1a7f37", "#8250df", "#bc4c00"), strict=False))
    for place, name in enumerate(DECAYS):
        rate = LearningRate(schedule_settings(name), warm_up, steps)
        points = " ".join(
            f"{left + width * step / steps:.1f},{top + height * (1 - rate(step)):.1f}"
            for step in (*range(0, steps, 10), steps - 1)
        )
        parts.append(f"<polyline points='{points}' fill='none' stroke='{colors[name]}' stroke-width='2'/>")
        x = left + width + 16
        parts.append(
            f"<path d='M {x} {top + 20 + 26 * place} h 26' stroke='{colors[name]}' stroke-width='3'/>"
        )
        parts.append(label(x + 34, top + 24 + 26 * place, name))
    parts.append(
        label(left, top + height + 40, "share of optimizer.learning_rate; minimum_ratio 0.1", size=11)
    )
    text = f"{', '.join(DECAYS)}: linear warm-up to 1, then each schedule's decay"
    return picture("learning-rate", left + width + 130, top + height + 54, "Learning rates", text, parts)


def schedule_settings(name: str) -> SimpleNamespace:
    """Return settings of [optimizer] with a peak of 1."""
    return SimpleNamespace(
        learning_rate=1.0, minimum_ratio=0.1, schedule=name, decay_fraction=0.1, decay_shape="sqrt"
    )


def precision() -> str:
    """Draw the bits of the types of `training.precision`: sign, exponent, mantissa."""
    bits = {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10)}
    box, left = 17, 66
    parts = [label(16, 24, "Bits of a number", bold=True)]
    for row, (name, (exponent, mantissa)) in enumerate(bits.items()):
        assert 8 * PRECISIONS[name].size_bytes == 1 + exponent + mantissa
        y = 40 + row * 34
        parts.append(label(left - 10, y + 15, name, anchor="end"))
        for bit in range(1 + exponent + mantissa):
            color = RED if not bit else BLUE if bit <= exponent else GREEN
            parts.append(rectangle(left + bit * box, y, box - 2, 22, color))
    y = 40 + len(bits) * 34
    legend = {"sign": RED, "exponent: the range": BLUE, "mantissa: the digits": GREEN}
    x = float(left)
    for words, color in legend.items():
        parts += [rectangle(x, y + 4, 14, 14, color), label(x + 20, y + 16, words, size=12)]
        x += 40 + 7.4 * len(words)
    said = "; ".join(f"{name}: {e} bits of exponent, {m} of mantissa" for name, (e, m) in bits.items())
    return picture("precision", left + 32 * box + 16, y + 32, "fp32, bf16 and fp16", said, parts)


def lora() -> str:
    """Draw a frozen weight and the two small matrices beside it."""
    parts = [
        label(16, 24, "LoRA: the frozen weight W and a trained product B A of small rank", bold=True),
        *_matrix(30, 110, 20, 96, [GREY], "x", ""),
        *arrow(60, 130, 112),
        *_matrix(120, 54, 120, 76, [GREY], "W, frozen", ""),
        label(180, 98, "n by m", anchor="middle", size=12),
        *arrow(60, 190, 112),
        *_matrix(120, 176, 120, 24, [BLUE], "", ""),
        label(180, 193, "A, r by m, trained", anchor="middle", size=11),
        *arrow(248, 190, 276),
        *_matrix(284, 154, 24, 66, [BLUE], "", ""),
        label(316, 184, "B, n by r, trained,", size=11),
        label(316, 200, "starts at 0", size=11),
        *arrow(248, 94, 430),
        *_sign(446, 100, "+"),
        *arrow(430, 190, 438),
        f"<path d='M 446 186 V 110 m -5 7 l 5 -7 l 5 7' fill='none' stroke='{TEXT}' stroke-width='1.5'/>",
        *arrow(458, 94, 484),
        label(492, 99, "W x + (alpha / r) B A x"),
    ]
    text = "The output is W x plus (alpha / r) B A x; only A and B are trained, and B starts at zero"
    return picture("lora", 680, 240, "LoRA", text, parts)


def nodes(count: int = 2, cards: int = 4) -> str:
    """Draw nodes of cards: tensor-parallel groups stay on the fast links inside a node."""
    box, gap = 66, 70
    wide = cards * box + 24
    parts = [
        label(
            16, 24, f"{count} nodes of {cards} cards: tensor 2 x pipeline 2 x data 2, rank by rank", bold=True
        )
    ]
    for node in range(count):
        x = 16 + node * (wide + gap)
        parts += [rectangle(x, 40, wide, 112, "#ffffff"), label(x + 12, 60, f"node {node}: stage {node}")]
        for card in range(cards):
            rank = node * cards + card
            left = x + 15 + card * box
            parts.append(rectangle(left, 72, box - 6, 40, BLUE if card < 2 else GREEN))
            parts.append(label(left + 30, 97, f"rank {rank}", anchor="middle", size=12))
        for pair, color in ((0, BLUE), (1, GREEN)):
            left = x + 15 + pair * 2 * box
            parts.append(rectangle(left, 116, 2 * box - 6, 8, color))
        parts.append(
            label(x + wide / 2, 143, "tensor groups: fast links", anchor="middle", size=11, color=PALE)
        )
    parts += arrow(16 + wide + 4, 92, 16 + wide + gap - 6)
    parts.append(label(16 + wide + gap / 2, 84, "network", anchor="middle", size=11, color=PALE))
    parts.append(
        label(
            16,
            174,
            "Blue and green are the two replicas. Hidden states and sums of gradients tolerate the slower network.",
            size=11,
            color=PALE,
        )
    )
    text = "Tensor-parallel pairs lie inside a node; the pipeline crosses the network between the nodes"
    return picture("nodes", 2 * 16 + count * wide + (count - 1) * gap, 188, "Ranks on nodes", text, parts)


def windows(tokens: int = 16, window: int = 8, stride: int = 4) -> str:
    """Draw the windows of an evaluation: each token is scored once, behind as much context as fits."""
    box, left = 30, 96
    parts = [
        label(
            16, 24, f"Windows of {window} tokens, a stride of {stride}: each token is scored once", bold=True
        )
    ]
    starts = range(0, tokens - window + 1, stride)
    for row, start in enumerate(starts):
        y = 40 + row * 32
        parts.append(label(left - 10, y + 16, f"window {row + 1}", anchor="end", size=12))
        for token in range(start, start + window):
            scored = not row or token >= start + window - stride
            parts.append(rectangle(left + token * box, y, box - 2, 24, GREEN if scored else GREY))
            parts.append(label(left + token * box + 14, y + 16, str(token + 1), anchor="middle", size=10))
    y = 48 + len(starts) * 32
    for place, (words, color) in enumerate({"scored": GREEN, "context only": GREY}.items()):
        x = left + 110 * place
        parts += [rectangle(x, y, 14, 14, color), label(x + 20, y + 12, words, size=12)]
    text = "Overlapping windows: the last tokens of each window are scored, the earlier ones are context"
    return picture("windows", left + tokens * box + 16, y + 28, "Windows of an evaluation", text, parts)


def batching() -> str:
    """Draw requests that join and leave a batch between steps."""
    unit, left = 36, 110
    requests = {
        "request 1": (0, 5),
        "request 2": (0, 9),
        "request 3": (2, 4),
        "request 4": (5, 6),
        "request 5": (6, 6),
    }
    steps = max(start + length for start, length in requests.values())
    parts = [label(16, 24, "Requests share each forward: they join and leave between steps", bold=True)]
    for row, (name, (start, length)) in enumerate(requests.items()):
        y = 40 + row * 28
        parts.append(label(left - 12, y + 15, name, anchor="end", size=12))
        parts.append(rectangle(left + start * unit, y, unit - 2, 20, ORANGE))
        for step in range(start + 1, start + length):
            parts.append(rectangle(left + step * unit, y, unit - 2, 20, BLUE))
    y = 40 + len(requests) * 28
    for step in range(steps):
        parts.append(label(left + step * unit + 17, y + 12, str(step + 1), anchor="middle", size=10))
    for place, (words, color) in enumerate({"reads the prompt": ORANGE, "one new token": BLUE}.items()):
        x = left + 150 * place
        parts += [rectangle(x, y + 24, 14, 14, color), label(x + 20, y + 36, words, size=12)]
    text = "Five requests of different lengths share the steps of one model"
    return picture("batching", left + steps * unit + 16, y + 52, "Batched requests", text, parts)


def _matrix(
    x: float,
    y: float,
    width: float,
    height: float,
    colors: list[str],
    name: str,
    note: str,
    *,
    rows: bool = False,
) -> Iterator[str]:
    edges = [place / len(colors) for place in range(len(colors) + 1)]
    for color, (start, end) in zip(colors, pairwise(edges), strict=True):
        if rows:
            yield rectangle(x, y + start * height, width, (end - start) * height, color)
        else:
            yield rectangle(x + start * width, y, (end - start) * width, height, color)
    if name:
        yield label(x + width / 2, y - 8, name, anchor="middle", size=11, bold=True)
    if note:
        yield label(x + width / 2, y + height + 16, note, anchor="middle", size=11, color=PALE)


def _sign(x: float, y: float, text: str) -> list[str]:
    return [label(x, y, text, anchor="middle", size=18)]


def _down(x: float, y: float, end: float) -> list[str]:
    return [
        f"<path d='M {x:g} {y:g} V {end:g} m -5 -7 l 5 7 l 5 -7' fill='none' stroke='{TEXT}' stroke-width='1.5'/>"
    ]
