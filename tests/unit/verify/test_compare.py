"""A comparison names the first tensor that departs, where and on which ranks, and a tensor that nobody has."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.verify.compare import Comparer, LayoutComparison
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
)
from megalite.verify.record import RecordedPiece, StepRecord

ROWS, COLUMNS = 4, 3
BOUNDS = dict.fromkeys(ORDER, 1e-10)
NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight")
TENSOR = {
    name: torch.arange(1.0, 13.0, dtype=torch.float64).view(ROWS, COLUMNS) + at
    for at, name in enumerate(NAMES)
}


def piece(
    quantity: str, name: str, values: Tensor, first: int = 0, copies: tuple[int, ...] = (0,)
) -> RecordedPiece:
    parts = ((name, (first, 0), tuple(values.shape), True),)
    return RecordedPiece(quantity, name, parts, 0, values.reshape(-1).clone(), copies)


def one(step: int) -> StepRecord:
    quantities = [OWN, SUMMED, STATE + "exp_avg", UPDATED] if step else [INITIAL]
    pieces = [piece(quantity, name, TENSOR[name]) for quantity in quantities for name in NAMES]
    outputs = {
        site: {0: [2.0, 1.0]} for site in ("model.layers.0", "model.layers.0.self_attn", "model.embed_tokens")
    }
    return StepRecord(pieces, 1.5, 2.5, outputs=outputs, row_ranks=(0,))


def halves(rank: int, step: int) -> StepRecord:
    """Tensors are cut in two over ranks 0 and 1, and their copies are on 2 and 3, which have half of each gradient."""
    pieces = []
    for each in one(step).pieces:
        first, copies = rank % 2 * 2, (rank % 2, rank % 2 + 2)
        values = TENSOR[each.name][first : first + 2] * (0.5 if each.quantity == OWN else 1.0)
        pieces.append(piece(each.quantity, each.name, values, first, copies))
    return replace(one(step), pieces=pieces, row_ranks=(rank,))


def compared(rank: int, change: object) -> LayoutComparison:
    """Compare halves of which `change` alters one rank's record of step 1."""

    def read(each: int, step: int) -> StepRecord:
        record = halves(each, step)
        return change(record) if each == rank and step == 1 else record  # type: ignore[operator]

    return Comparer(read, one, 4, BOUNDS, torch.float64).compare(1)


def with_value(quantity: str, name: str, value: float) -> object:
    def change(record: StepRecord) -> StepRecord:
        for each in record.pieces:
            if (each.quantity, each.name) == (quantity, name):
                each.values[4] = value
        return record

    return change


def first(comparison: LayoutComparison) -> Departure:
    return comparison.departures[0]


def test_equal_recordings_have_no_departure_and_every_tensor_is_counted() -> None:
    found = compared(0, lambda record: record)
    assert found.departures == []
    assert {name: worst.tensors for name, worst in found.worst.items()} == {
        INITIAL: 2,
        **dict.fromkeys((OWN, SUMMED, STATE + "exp_avg", UPDATED), 2),
        **dict.fromkeys((LOSS, NORM), 1),
    }


@pytest.mark.parametrize(
    ("quantity", "ranks"),
    [(OWN, (1, 3)), (SUMMED, (3,)), (STATE + "exp_avg", (3,)), (UPDATED, (3,))],
)
def test_a_value_is_named_with_its_place_in_the_whole_tensor_and_its_ranks(
    quantity: str, ranks: tuple[int, ...]
) -> None:
    found = first(compared(3, with_value(quantity, NAMES[1], 100.0)))
    assert (found.quantity, found.name, found.step, found.ranks) == (quantity, NAMES[1], 1, ranks)
    assert found.place == (3, 1) and found.expected == TENSOR[NAMES[1]][3, 1]
    assert found.ulps > 1e12


@pytest.mark.parametrize("bound", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_the_worst_tensor_is_noted_whatever_is_allowed(name: str, bound: float) -> None:
    def read(rank: int, step: int) -> StepRecord:
        record = one(step)
        for each in record.pieces:
            each.values[4] += 2.0 if each.name == name else 1.0
        return record

    worst = Comparer(read, one, 1, dict.fromkeys(ORDER, bound), torch.float64).compare(1).worst
    quantities = [INITIAL] if bound == 0 else [INITIAL, OWN, SUMMED, STATE + "exp_avg", UPDATED]
    largest = 2.0 / TENSOR[name].max().item()
    for quantity in quantities:
        assert (worst[quantity].name, worst[quantity].error) == (name, largest)


def test_a_tensor_with_a_bound_of_its_own_loosens_no_other() -> None:
    def read(rank: int, step: int) -> StepRecord:
        record = one(step)
        for each in record.pieces:
            each.values[4] += 1.0 if each.quantity == UPDATED else 0.0
        return record

    bounds = BOUNDS | {f"{UPDATED} of {NAMES[0]}": 1.0}
    found = Comparer(read, one, 1, bounds, torch.float64).compare(1)
    assert [each.name for each in found.departures] == [NAMES[1]]
    assert found.worst[UPDATED].name == NAMES[1] and set(found.errors[UPDATED]) == {*NAMES}


@pytest.mark.parametrize(("value", "holds"), [(1e-6, True), (1.0, False)])
def test_weights_of_fp16_are_measured_by_its_smallest_normal_number_at_least(
    value: float, holds: bool
) -> None:
    def record(step: int, error: float = 0.0) -> StepRecord:
        weights = torch.full((2, 2), value, dtype=torch.float64)
        return replace(
            one(step), pieces=[piece(UPDATED if step else INITIAL, NAMES[0], weights * (1 + error))]
        )

    bounds = dict.fromkeys(ORDER, 2.0**-10)
    found = Comparer(lambda rank, step: record(step, 2.0**-8), record, 1, bounds, torch.float16).compare(1)
    assert (found.departures == []) == holds


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_depart(value: float) -> None:
    assert first(compared(2, with_value(UPDATED, NAMES[0], value))).error == float("inf")


def test_a_gradient_that_no_rank_has_is_a_failure() -> None:
    def without(record: StepRecord) -> StepRecord:
        return replace(
            record, pieces=[each for each in record.pieces if (each.quantity, each.name) != (OWN, NAMES[0])]
        )

    found = first(compared(0, without))
    assert (found.quantity, found.name) == (OWN, NAMES[0]) and "no rank has 6 of its 12" in found.note
    # The sum misses the part of a rank that has none.
    assert first(compared(2, without)).error == float("inf")


def test_the_backwards_first_tensor_is_named_and_a_gradient_before_what_follows_from_it() -> None:
    def wrong(record: StepRecord) -> StepRecord:
        for each in record.pieces:
            each.values.mul_(2)
        return record

    assert (first(compared(0, wrong)).quantity, first(compared(0, wrong)).name) == (OWN, NAMES[1])


def test_a_loss_that_departs_leads_to_the_first_wrong_output() -> None:
    def wrong(record: StepRecord) -> StepRecord:
        outputs = {site: {0: [4.0, 1.0]} for site in record.outputs if site != "model.embed_tokens"}
        return replace(record, loss=1.6, outputs=record.outputs | outputs)

    found = compared(1, wrong).departures
    assert [each.quantity for each in found] == [OUTPUT, LOSS]
    assert (found[0].name, found[0].ranks) == ("model.layers.0.self_attn", (1,))
    assert found[1].ranks == (1,) and found[1].value == 1.6


def test_an_update_of_a_gradient_that_is_noise_is_allowed_where_updates_are_signs() -> None:
    """Lion moves a weight by its learning rate, whatever the sign of rounding noise says."""
    gradient = TENSOR[NAMES[0]].clone()
    gradient[0, 0] = 1e-12

    def single(step: int) -> StepRecord:
        pieces = [piece(SUMMED, NAMES[0], gradient), piece(UPDATED, NAMES[0], TENSOR[NAMES[0]])]
        return StepRecord(pieces if step else [], 1.5, 2.5, 0.01)

    def held(moved: float, *, signs: bool, place: int = 0) -> bool:
        def read(rank: int, step: int) -> StepRecord:
            record = single(step)
            if step:
                record.pieces[1].values[place] += moved
            return record

        comparer = Comparer(read, single, 1, BOUNDS, torch.float64, signs=signs)
        return not comparer.compare(1).departures

    assert held(0.02, signs=True) and not held(0.02, signs=False)
    assert not held(0.02, signs=True, place=4)
