"""Entry: the inputs, forms and shapes on which an operator is tested.

Every form that is compared or timed is taken from `ops.choice.Operators`, as the model's modules take it: the form that
was timed is the form that runs. To add an implementation of an operator, add its function to the operator's slot in
ops/choice.py, and a `Candidate` of that name to its entry in this package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.ops import extension
from megalite.ops.choice import TORCH, Operators

Shape = tuple[int, ...]
Form = Callable[..., Any]
FLOATS, LOW_PRECISION = (torch.float32, torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16)
Make = Callable[[Shape, torch.dtype, Form], Sequence[Tensor]]


def always(inputs: Sequence[Tensor]) -> str:
    """Return no complaint: the implementation computes any case."""
    return ""


def anywhere(device_type: str) -> str:
    """Return no complaint: the implementation runs on any device."""
    return ""


@dataclass(frozen=True)
class Candidate:
    """An implementation of an operator, beside torch's.

    why_not_on(device_type): why the implementation is absent on such a device; empty if present. why_not(inputs): why
    the implementation cannot compute these inputs; empty if it can. repeats: a second call must give equal bits.
    """

    why_not_on: Callable[[str], str] = anywhere
    why_not: Callable[[Sequence[Tensor]], str] = always
    repeats: bool = False


@dataclass(frozen=True)
class Workload:
    """The shapes of one rank of a run, as its operators see them; by default those of a small Llama.

    rows: sequences in a micro batch. heads, key_value_heads, intermediate_size, vocabulary: this rank's share. qk_norm:
    whether queries and keys are normalised. window: the keys that a token sees in layers with a sliding window.
    hidden_act: see ModelShape. experts_per_token: 0: the model has no experts. dropout: whether attention
    probabilities are dropped.
    """

    dtype: torch.dtype
    rows: int = 1
    sequence: int = 1024
    hidden_size: int = 1024
    intermediate_size: int = 2816
    heads: int = 16
    key_value_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 32000
    norm: str = "rms_norm"
    gated: bool = True
    experts_per_token: int = 0
    hidden_act: str = "silu"
    rotary: bool = True
    qk_norm: bool = False
    full_attention: bool = True
    window: int | None = None
    documents: bool = False
    dropout: bool = False
    softcap: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence


@dataclass(frozen=True)
class Entry:
    """One form of an operator: its inputs, its implementations, and the shapes on which they are compared.

    operator: its name in ops.choice.SLOTS. make(shape, dtype, random): the inputs, where random(*sizes) draws a tensor
    of that dtype; the first `gradients` of them are differentiated. plain: the formula in torch; in float64 it is the
    reference. form_of(operators): what a model with these operators computes. Forms are functions of these inputs that
    return one or several tensors and may overwrite their inputs. candidates: implementation -> what rules it out.
    units: allowed error in fp32, in units in the last place of the largest value, beside twice the plain form's error.
    shapes: tiny odd sizes. own: the shape for a run, or None if the run does not use the entry.
    """

    name: str
    operator: str
    make: Make
    plain: Form
    form_of: Callable[[Operators], Form]
    candidates: Mapping[str, Candidate]
    shapes: tuple[Shape, ...]
    gradients: int = 0
    dtypes: tuple[torch.dtype, ...] = FLOATS
    own: Callable[[Workload], Shape | None] = lambda workload: None
    units: float = 1.0

    def form(self, implementation: str = TORCH) -> Form:
        """Return what a model computes that has this implementation of the operator."""
        return self.form_of(Operators.all(implementation, (self.operator,)))


def compiled(*needs: str, why_not: Callable[[Sequence[Tensor]], str] = always) -> Candidate:
    """Return the candidate of the compiled library, which needs these registered operators."""

    def why_not_on(device_type: str) -> str:
        if complaint := extension.why_not(device_type):
            return complaint
        missing = [name for name in needs if not hasattr(torch.ops.megalite, name)]
        return f"this library has no {', '.join(missing)}" if missing else ""

    return Candidate(why_not_on, why_not, repeats=True)


@dataclass(frozen=True)
class Case:
    """An entry on a run's own shape, or on odd sizes."""

    entry: Entry
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    own: bool

    @property
    def key(self) -> str:
        """Return the key under which findings are kept."""
        sizes = "x".join(map(str, self.shapes[0])) if self.own else "odd sizes"
        return f"{self.entry.name}, {str(self.dtype).removeprefix('torch.')}, {sizes}"

    def covers(self, key: str) -> bool:
        """Return whether a key is of this case, with any tokens: the first size, or the first two."""
        if not self.own:
            return key == self.key
        (name, _, own), (other_name, _, other) = self.key.rpartition(", "), key.rpartition(", ")
        tokens = 1 if len(self.shapes[0]) == 2 else 2
        return name == other_name and own.split("x")[tokens:] == other.split("x")[tokens:]


def cases_of(entries: Sequence[Entry], workload: Workload) -> list[Case]:
    """Return the cases that a run needs proved: the entries that it uses, on its own shapes and on odd sizes."""
    cases: list[Case] = []
    for entry in entries:
        own = entry.own(workload)
        if own is not None and workload.dtype in entry.dtypes:
            cases.append(Case(entry, workload.dtype, entry.shapes, own=False))
            cases.append(Case(entry, workload.dtype, (own,), own=True))
    return cases


class _OwnMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def overwritable(tensor: Tensor) -> Tensor:
    """Return the same memory as another tensor for autograd: a leaf itself cannot be overwritten in place."""
    result: Tensor = _OwnMemory.apply(tensor)
    return result
