"""Compares what the ranks of a layout recorded with what one process recorded, and finds where they part first."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.topology.state import EMA, MASTER
from megalite.verify.findings import (
    INITIAL,
    LOSS,
    NORM,
    ORDER,
    OUTPUT,
    OWN,
    STATE,
    SUMMED,
    UPDATED,
    Departure,
    LayoutComparison,
    Worst,
)
from megalite.verify.measure import magnitudes
from megalite.verify.record import RecordedPiece, StepRecord

# A module's output is looked at only to find the place of a departure: sums over many values round more.
_OUTPUT_FACTOR = 100


@dataclass(frozen=True)
class _Finding:
    """The worst value of a tensor on one rank, or of the sum over several."""

    ranks: tuple[int, ...]
    error: float
    ulps: float
    place: tuple[int, ...]
    value: float
    expected: float

    @property
    def numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("ulps", "place", "value", "expected")}


class Comparer:
    """Compares step by step. `read` gives the records of a rank's step, `one` the process's."""

    def __init__(
        self,
        read: Callable[[int, int], StepRecord],
        one: Callable[[int], StepRecord],
        ranks: int,
        bounds: Mapping[str, float],
        dtype: torch.dtype,
        *,
        signs: bool = False,
    ):
        """bounds: of quantities, and of single tensors as "quantity of name". dtype: the number type of the run.

        signs: updates have full size where a gradient is rounding noise, as Lion's.
        """
        self._signs = signs
        self._read, self._one, self._ranks, self._bounds = read, one, ranks, bounds
        self._finfo = torch.finfo(dtype)
        self.result = LayoutComparison()

    def compare(self, steps: int) -> LayoutComparison:
        """Compare the initial weights and each step, up to the first one with a departure."""
        for step in range(steps + 1):
            records, one = [self._read(rank, step) for rank in range(self._ranks)], self._one(step)
            self.result.skipped_steps += one.skipped
            if step:
                self._numbers(step, records, one)
            quantities = [INITIAL] if step == 0 else [OWN, SUMMED, STATE, UPDATED]
            for quantity in quantities:
                if not (one.skipped and quantity in (OWN, SUMMED)):
                    self._tensors(step, quantity, records, one)
            if self.result.departures:
                self._order(step, records, one)
                return self.result
        return self.result

    def bound(self, quantity: str, name: str = "") -> float:
        """Return the largest relative error of a correct run, in each step: of a tensor, or of its quantity."""
        of = STATE if quantity.startswith(STATE) else quantity
        return self._bounds.get(f"{quantity} of {name}", self._bounds[of])

    def _order(self, step: int, records: Sequence[StepRecord], one: StepRecord) -> None:
        def turn(each: Departure) -> int:
            return ORDER.index(STATE if each.quantity.startswith(STATE) else each.quantity)

        self.result.departures.sort(
            key=turn
        )  # stable: within a quantity the order of the model, or of the backward
        if self.result.departures[0].quantity == LOSS and (found := self._first_output(step, records, one)):
            self.result.departures.insert(0, found)

    def _numbers(self, step: int, records: Sequence[StepRecord], one: StepRecord) -> None:
        for quantity, own, expected in (
            (LOSS, [each.loss for each in records], one.loss),
            (NORM, [each.norm for each in records], one.norm),
        ):
            if one.skipped and quantity == NORM:
                continue
            errors = [_number_error(value, expected) for value in own]
            self._note(quantity, max(errors), "", step, 1)
            wrong = tuple(rank for rank, error in enumerate(errors) if not error <= self.bound(quantity))
            if wrong:
                value = own[wrong[0]]
                ulps = abs(value - expected) / math.ulp(expected) if math.isfinite(expected) else math.nan
                error, bound = errors[wrong[0]], self.bound(quantity)
                self.result.departures.append(
                    Departure(step, quantity, "", wrong, error, bound, ulps, (), value, expected)
                )

    def _tensors(self, step: int, quantity: str, records: Sequence[StepRecord], one: StepRecord) -> None:
        """Compare the tensors of a quantity; of STATE each key."""
        keys = [quantity]
        if quantity in (SUMMED, STATE):
            # ZeRO 2 and 3 have no sums to show, and each optimizer has states of its own.
            there = dict.fromkeys(each.quantity for record in records for each in record.pieces)
            keys = [key for key in there if key == quantity or (quantity == STATE and key.startswith(STATE))]
        for key in keys:
            pieces = [[each for each in record.pieces if each.quantity == key] for record in records]
            expected = _whole(one, UPDATED if key == STATE + MASTER else key)
            if key == STATE + MASTER:
                expected = {name: expected[name] for name in _whole(one, SUMMED)}
            if expected:
                self._named(step, key, pieces, expected, self._scales(step, key, expected, one))

    def _scales(
        self, step: int, quantity: str, expected: Mapping[str, Tensor], one: StepRecord
    ) -> dict[str, Tensor]:
        """Return what the error of each value is measured by: the magnitude of its tensor.

        The scale of weights is at least the smallest normal number: the spacing of fp16 is constant below it.
        Where updates are signs, that of updated weights is more by twice the learning rate, times the ratio of the
        largest gradient to its own: an update is known as well as its own gradient.
        """
        by = magnitudes(expected)
        if quantity in (INITIAL, UPDATED):
            by = {name: max(size, self._finfo.tiny) if size else size for name, size in by.items()}
        scales = {
            name: torch.tensor(by[name], dtype=torch.float64).expand(each.shape)
            for name, each in expected.items()
        }
        if self._signs and quantity in (UPDATED, STATE + MASTER, STATE + EMA):
            most = 1 / max(self.bound(quantity), torch.finfo(torch.float64).eps)
            gradients = _whole(one, SUMMED)
            # The gradient of a key's bias is rounding noise, which an update has in full size.
            largest = magnitudes(gradients)
            for name, gradient in gradients.items():
                size = gradient.abs()
                untouched = (size == 0) & (size.max() == largest[name]) if size.numel() else size == 0
                ratio = (largest[name] / size).clamp(max=most)
                scales[name] = scales[name] + 2 * one.learning_rate * torch.where(untouched, 0, ratio)
        return scales

    def _named(
        self,
        step: int,
        quantity: str,
        pieces: Sequence[Sequence[RecordedPiece]],
        expected: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
    ) -> None:
        found = defaultdict[str, list[_Finding]](list)
        seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in expected.items()}
        whole = _summed(pieces) if quantity == OWN else enumerate(pieces)
        for rank, own in whole:
            for piece in own:
                ranks = piece.copies if quantity == OWN else (rank,)
                for name, finding in _findings(ranks, piece, expected, scales, seen, self._finfo.eps):
                    found[name].append(finding)
        backwards = quantity in (OWN, SUMMED)
        for name in reversed([*expected]) if backwards else expected:
            missing = int((~seen[name]).sum())
            self._judge(step, quantity, name, found[name], missing, expected[name].numel())

    def _judge(
        self, step: int, quantity: str, name: str, found: Sequence[_Finding], missing: int, size: int
    ) -> None:
        bound = self.bound(quantity, name)
        if missing and not quantity.startswith(STATE):
            note = f"no rank has {missing} of its {size} values"
            self.result.departures.append(Departure(step, quantity, name, (), math.inf, bound, note=note))
        if not found:
            return
        worst = max(found, key=lambda each: math.inf if math.isnan(each.error) else each.error)
        self._note(quantity, worst.error, name, step, size)
        wrong = [each for each in found if not each.error <= bound]
        if wrong:
            ranks = tuple(sorted({rank for each in wrong for rank in each.ranks}))
            self.result.departures.append(
                Departure(
                    step,
                    quantity,
                    name,
                    ranks,
                    worst.error,
                    bound,
                    worst.ulps,
                    worst.place,
                    worst.value,
                    worst.expected,
                )
            )

    def _note(self, quantity: str, error: float, name: str, step: int, values: int) -> None:
        errors, worst = self.result.errors[quantity], self.result.worst[quantity]
        errors[name] = max(error, errors.get(name, 0.0))
        noted = Worst(error, self.bound(quantity, name), name, step)
        largest = noted if not worst.tensors or (noted.share, error) > (worst.share, worst.error) else worst
        self.result.worst[quantity] = replace(
            largest, tensors=worst.tensors + 1, values=worst.values + values
        )

    def _first_output(self, step: int, records: Sequence[StepRecord], one: StepRecord) -> Departure | None:
        """Return the first module, in the order of the forward, whose output is not that of one process."""
        bound = _OUTPUT_FACTOR * self.bound(LOSS)
        for site in sorted(one.outputs, key=_forward_order):
            wrong: dict[int, float] = {}
            seen = {sample for record in records for sample in record.outputs.get(site, ())}
            others = sorted(one.outputs[site].keys() ^ seen)
            # A compiled layer has no outputs of its blocks.
            if others and (seen or not site.endswith(("self_attn", "mlp"))):
                foreign = f"samples are not those of one process, as {others[0]}"
                note = foreign if seen else "no rank computes it"
                return Departure(step, OUTPUT, site, (), math.inf, bound, note=note)
            for rank, record in enumerate(records):
                for sample in record.outputs.get(site, {}):
                    own = [records[each].outputs[site][sample] for each in record.row_ranks]
                    total = [sum(values) for values in zip(*own, strict=True)]
                    error = _output_error(total, one.outputs[site][sample])
                    if not error <= bound:
                        wrong[rank] = max(error, wrong.get(rank, 0.0))
            if wrong:
                ranks = tuple(wrong)
                return Departure(step, OUTPUT, site, ranks, max(wrong.values()), bound)
        return None


def _whole(one: StepRecord, quantity: str) -> dict[str, Tensor]:
    """Return canonical name -> the whole tensor in float64, in the order of the model."""
    whole = {}
    for piece in one.pieces:
        if piece.quantity == quantity:
            offset = 0
            for name, _, shape, _ in piece.parts:
                size = math.prod(shape)
                whole[name] = piece.values[offset : offset + size].double().view(shape)
                offset += size
    return whole


def _summed(pieces: Sequence[Sequence[RecordedPiece]]) -> Iterator[tuple[int, list[RecordedPiece]]]:
    """Yield the sum of a rank's gradients and those of its copies, once for each group of copies, by its first rank."""
    named = [{each.name: each for each in own} for own in pieces]
    for rank, own in enumerate(named):
        sums = []
        for name, piece in own.items():
            if piece.copies[0] != rank:
                continue
            others = [named[other].get(name) for other in piece.copies]
            # A rank without its gradient leaves a hole: the sum is not that of all.
            values = [each.values for each in others if each is not None]
            total = torch.stack(values).sum(dim=0) if len(values) == len(others) else piece.values * math.nan
            sums.append(RecordedPiece(piece.quantity, name, piece.parts, piece.start, total, piece.copies))
        yield rank, sums


def _findings(
    ranks: tuple[int, ...],
    piece: RecordedPiece,
    expected: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    seen: Mapping[str, Tensor],
    eps: float,
) -> Iterator[tuple[str, _Finding]]:
    """Yield each canonical tensor of a piece with its worst value, and mark what was seen of it."""
    begin, gradient = 0, piece.quantity in (OWN, SUMMED) or piece.quantity.startswith(STATE)
    for name, offsets, shape, counts in piece.parts:
        size = math.prod(shape)
        low, high = max(piece.start, begin), min(piece.start + len(piece.values), begin + size)
        begin += size
        # Ranks that share a head leave its gradient and so its moments to the first of them.
        if low >= high or name not in expected or (gradient and not counts):
            continue
        region = tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))
        mask = torch.zeros(size, dtype=torch.bool)
        mask[low - begin + size : high - begin + size] = True
        seen[name][region] |= mask.view(shape)
        taken = slice(low - begin + size, high - begin + size)
        reference, scale = (whole[name][region].reshape(-1)[taken] for whole in (expected, scales))
        own = piece.values[low - piece.start : high - piece.start].double()
        difference = (own - reference).abs()
        errors = torch.where(difference > 0, difference / scale, 0)
        errors[difference.isnan()] = math.inf
        at = int(errors.argmax())
        place = _global(taken.start + at, offsets, shape)
        wanted = reference[at].item()
        unit = max(abs(wanted), torch.finfo(torch.float64).tiny) * eps
        ulps = difference[at].item() / unit
        yield name, _Finding(ranks, errors[at].item(), ulps, place, own[at].item(), wanted)


def _global(flat: int, offsets: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    place = []
    for offset, length in zip(reversed(offsets), reversed(shape), strict=True):
        flat, index = divmod(flat, length)
        place.append(offset + index)
    return tuple(reversed(place))


def _number_error(value: float, expected: float) -> float:
    if value == expected:
        return 0.0
    if not (math.isfinite(value) and math.isfinite(expected)):
        return math.inf
    return abs(value - expected) / abs(expected) if expected else math.inf


def _output_error(own: Sequence[float], expected: Sequence[float]) -> float:
    """Compare two sums over an output: of squares, and weighted ones, which are measured by the root of squares."""
    square, weighted = (abs(a - b) for a, b in zip(own, expected, strict=True))
    if not math.isfinite(square + weighted):
        return math.inf
    size = expected[0]
    return max(square / size, weighted / math.sqrt(size)) if size else (math.inf if square else 0.0)


def _forward_order(site: str) -> tuple[float, int]:
    if not site.startswith("model.layers."):
        return -1.0, 0
    layer, _, block = site.removeprefix("model.layers.").partition(".")
    return float(layer), ["self_attn", "mlp", ""].index(block)
