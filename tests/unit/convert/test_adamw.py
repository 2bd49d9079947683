"""Numbers of other programs' checkpoints."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from megalite.convert.foreign.adamw import number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(3), 3.0),
        (torch.tensor([0.5]), 0.5),
        (torch.ones((), device="meta"), None),
        (torch.tensor(float("nan")), None),
        (torch.ones(2), None),
        (torch.tensor(1j), None),
        (10**400, None),
        (Fraction(1, 2), None),
        (True, None),
    ],
    ids=str,
)
def test_only_a_finite_number_is_one(value: Any, expected: float | None) -> None:
    assert number(value) == expected
