"""Whether a disturbed run came to the numbers of a calm one: bit for bit in the same layout, else within a bound."""

import math
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.folder import published_checkpoints, published_name, read_manifest
from megalite.monitor.jsonl import read_metrics
from megalite.topology.state import WEIGHT

BOUND = 1e-5
"""The largest relative difference of a loss or of a tensor's norm in another layout."""
_CURVE = ("step", "loss", "grad_norm", "learning_rate", "tokens")


@dataclass(frozen=True)
class Equality:
    """The comparison of two runs. bitwise: the layout was the same throughout, and nothing may differ.

    steps: whose records were compared. checkpoint: the step whose weights were; None: there was none to compare.
    loss, weights: the largest relative difference; weights None where their bits were compared. different: the first
    thing that differs too much; "" where none.
    """

    bitwise: bool
    steps: int
    checkpoint: int | None
    loss: float
    weights: float | None
    different: str

    def __str__(self) -> str:
        if self.different:
            return f"NOT equal to the calm run: {self.different}"
        weights = "no weights" if self.checkpoint is None else f"all tensors of step {self.checkpoint:,}"
        how = (
            "bit for bit"
            if self.bitwise
            else f"losses within {self.loss:.1e}, weights within {self.weights or 0:.1e}"
        )
        return f"equal to the calm run: {self.steps:,} steps and {weights}, {how}"


def curve(run_folder: Path) -> list[tuple[float, ...]]:
    """Return what must not depend on kills or launchers: step, loss, norm, learning rate and tokens of every step."""
    records = read_metrics(run_folder / "metrics.jsonl")
    # A validation before the first step has a record of its own, without a step's loss.
    return [tuple(record[key] for key in _CURVE) for record in records if "loss" in record]


def tensor_hashes(checkpoint: Path) -> dict[tuple[str, ...], str]:
    """Return the hash of every shard of a checkpoint."""
    return {
        (kind, name, str(shard.offsets), str(shard.flat)): shard.sha256
        for kind, tensors in read_manifest(checkpoint).tensors.items()
        for name, entry in tensors.items()
        for shard in entry.shards
    }


def step_to_compare(run_folder: Path, every: object) -> int | None:
    """Return the newest checkpoint that a run that ends elsewhere has too; None without one.

    every: checkpoint.every; the last step of a whole run is one too.
    """
    steps = sorted(published_checkpoints(run_folder / "checkpoints"), reverse=True)
    return next((step for step in steps if isinstance(every, int) and step % every == 0), None)


def compare(disturbed: Path, calm: Path, kept: Path | None, *, bitwise: bool) -> Equality:
    """Compare the records of two run folders, and the weights in a checkpoint of the calm one with the same step's."""
    pairs = list(zip(curve(disturbed), curve(calm), strict=False))
    step = None if kept is None else read_manifest(kept).step
    losses, weights, different = 0.0, None, ""
    if [first[0] for first, _ in pairs] != list(range(1, len(pairs) + 1)):
        different = "metrics.jsonl lacks a step, or has one twice"
    for first, second in pairs:
        losses = max(losses, relative(first[1], second[1]))
        wrong = first != second if bitwise else relative(first[1], second[1]) > BOUND
        if wrong and not different:
            different = f"step {first[0]:g}: loss {first[1]!r}, of the calm run {second[1]!r}"
    if kept is not None and step is not None:
        own = disturbed / "checkpoints" / published_name(step)
        if bitwise:
            hashes, others = tensor_hashes(own), tensor_hashes(kept)
            wrong_ones = sorted(key for key in hashes | others if hashes.get(key) != others.get(key))
            if wrong_ones and not different:
                different = f"{wrong_ones[0][0]} of {wrong_ones[0][1]} after step {step}"
        else:
            weights, name = _largest_difference(own, kept)
            if weights > BOUND and not different:
                different = f"{name} after step {step}: {weights:.2e} of its norm"
    return Equality(bitwise, len(pairs), step, losses, weights, different)


def relative(first: float | None, second: float | None) -> float:
    """Return the difference over the second number; two nulls, which stand for inf and nan, are equal."""
    if first is None or second is None:
        return 0.0 if first is second else math.inf
    return abs(first - second) / max(abs(second), 1e-30)


def _largest_difference(first: Path, second: Path) -> tuple[float, str]:
    """Return the largest norm of a difference of weights over the norm, and whose it is."""
    from megalite.verify.checkpoints import compare_checkpoints

    compared = compare_checkpoints(str(second), str(first))
    lone, weight = [*compared.only["A"], *compared.only["B"]], f"{WEIGHT} of "
    # A weight that one of them lacks is infinitely far away.
    lacking = [(math.inf, name.removeprefix(weight)) for name in lone if name.startswith(weight)]
    differing = [(each.norm, each.name) for each in compared.tensors if each.state == WEIGHT]
    return max(lacking + differing, default=(0.0, ""))
