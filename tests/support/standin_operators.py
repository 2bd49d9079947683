"""Operators of the self-test on the stand-in accelerator; the worker process loads this file by name.

Some are megalite's own, whose CPU kernels run on the stand-in too, others have planted faults.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megalite.ops.choice import COMPILED
from megalite.selftest.registry import Candidate, Entry, anywhere
from megalite.selftest.table import ENTRIES as OWN
from tests.support.standin import use_standin

use_standin()


def _off_by_a_tenth(x: Tensor) -> Tensor:
    off = torch.zeros_like(x)
    off[..., -1] = 0.1
    return 2 * x + off


def _left_on_the_cpu(x: Tensor) -> Tensor:
    return x + torch.ones(x.shape)


def _planted(name: str, operator: str, form: object) -> Entry:
    return Entry(
        name=name,
        operator=operator,
        make=lambda shape, dtype, random: [random(*shape)],
        plain=lambda x: x + x,
        form_of=lambda operators: form if operators.uses(operator) else lambda x: 2 * x,  # type: ignore[arg-type, return-value]
        candidates={COMPILED: Candidate()},
        gradients=1,
        shapes=((4, 6), (30, 7)),
        own=lambda run: (run.tokens, run.hidden_size),
    )


def _here(entry: Entry) -> Entry:
    """Return the entry without the check whether the library has kernels for this device type."""
    return replace(
        entry,
        candidates={name: replace(each, why_not_on=anywhere) for name, each in entry.candidates.items()},
    )


ENTRIES = [
    *(
        _here(entry)
        for entry in OWN
        if entry.operator in ("norm", "glu", "rotary", "adamw", "sum_of_squares")
    ),
    _planted("off by a tenth", "cross_entropy", _off_by_a_tenth),
    _planted("left on the CPU", "bias_gelu", _left_on_the_cpu),
]
