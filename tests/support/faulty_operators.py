"""Operators with planted faults; the self-test's worker process loads this file by name."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.selftest.registry import Candidate, Entry

HANGING = "MEGALITE_TEST_HANGING"
"""Environment variable with the path of a file that the hanging operator creates when it starts."""


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2.01 * grad


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


def _one_element_off(x: Tensor) -> Tensor:
    off = torch.zeros_like(x)
    off.view(-1)[-1] = 1e-2
    return 2 * x + off


def _wrong_at_odd_sizes(x: Tensor) -> Tensor:
    return 2 * x if x.shape[-1] % 2 == 0 else 2.01 * x


def _not_a_number(x: Tensor) -> Tensor:
    return (2 * x).masked_fill(x > 2, torch.nan)


def unwritten(x: Tensor) -> Tensor:
    found = torch.empty_like(x)
    found[:-1] = 2 * x[:-1]
    return found


def unsteady(x: Tensor) -> Tensor:
    unsteady.calls += 1  # type: ignore[attr-defined]
    return 2 * x + (torch.finfo(x.dtype).eps * x.abs().max() / 4 if unsteady.calls % 2 else 0)  # type: ignore[attr-defined]


unsteady.calls = 0  # type: ignore[attr-defined]


def _transposed(x: Tensor) -> Tensor:
    return (2 * x).t()


def _crashing(x: Tensor) -> Tensor:
    os.abort()


def _exiting(x: Tensor) -> Tensor:
    os._exit(3)


def _hanging(x: Tensor) -> Tensor:
    if HANGING in os.environ:
        Path(os.environ[HANGING]).touch()
    time.sleep(600)
    return 2 * x


def _raising(x: Tensor) -> Tensor:
    raise RuntimeError("an illegal memory access was encountered\nmore of it")


def _slow(x: Tensor) -> Tensor:
    time.sleep(0.01)
    return 2 * x


def _entry(name: str, operator: str, form: Any, **others: Any) -> Entry:
    return Entry(
        name=name,
        operator=operator,
        make=lambda shape, dtype, random: [random(*shape)],
        plain=lambda x: x + x,
        form_of=lambda operators: form if operators.uses(operator) else _doubled,
        candidates={"megalite": Candidate(repeats=True, **others)},
        gradients=1,
        shapes=((4, 6), (300, 7)),
        own=lambda run: (run.tokens, run.hidden_size),
    )


# Fault -> operator and faulty form; one operator for each fault, so that each is chosen separately.
FAULTS: dict[str, tuple[str, Any]] = {
    "right": ("norm", _doubled),
    "one element off": ("add_norm", _one_element_off),
    "wrong at odd sizes": ("rotary", _wrong_at_odd_sizes),
    "wrong gradient": ("glu", WrongGradient.apply),
    "not a number": ("bias_gelu", _not_a_number),
    "unwritten": ("cross_entropy", unwritten),
    "unsteady": ("attention", unsteady),
    "another shape": ("attention_windows", _transposed),
    "crashing": ("attention_documents", _crashing),
    "exiting": ("attention_dropout", _exiting),
    "hanging": ("adamw", _hanging),
    "raising": ("sum_of_squares", _raising),
    "slow": ("accumulate", _slow),
}
ENTRIES = [_entry(name, operator, form) for name, (operator, form) in FAULTS.items()]
