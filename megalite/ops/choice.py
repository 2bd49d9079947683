"""The operators of a model, chosen once: a description (operator -> implementation) and the functions built from it.

No other file knows which implementation is used: modules call `ops.norm(...)`, `ops.attention(...)`. Calls that a
compiled operator cannot serve go to plain torch here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.ops import activations, adamw, apex, liger, norms, rotary
from megalite.ops.adamw import AdamW, AdamWRule, AdamWTensors
from megalite.ops.attention import (
    causal_attention,
    compiled_attention,
    compiled_pays,
    document_cu_seqlens,
    document_spans,
    documents_seen,
)
from megalite.ops.cross_entropy import COMPILED_CROSS_ENTROPY, TORCH_CROSS_ENTROPY, ShardCrossEntropy
from megalite.ops.documents import Documents, packed_cu_seqlens
from megalite.ops.dropout import CountedMask, Mask

TORCH = "torch"
COMPILED = "megalite"
"""The library that setup.py builds from csrc/."""

# Each operator that a model uses -> its name in messages.
NAMES = {
    "norm": "RMSNorm, LayerNorm",
    "add_norm": "residual add + norm",
    "rotary": "rotary embedding",
    "glu": "SwiGLU, GeGLU",
    "bias_gelu": "bias + GELU",
    "cross_entropy": "cross entropy",
    "attention": "causal attention",
    "attention_windows": "attention in a sliding window",
    "attention_documents": "attention within documents",
    "attention_dropout": "attention with dropout",
    "attention_softcap": "soft-capped attention",
    "adamw": "AdamW and the rounded weights",
    "sum_of_squares": "gradient norm",
    "accumulate": "gradient sums in float32",
}

Norm = Callable[[Tensor, Tensor, Tensor | None, float, bool], Tensor]
AddNorm = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Operators:
    """A model's operators, built from the name of each operator's implementation.

    chosen: operator of NAMES -> implementation; torch by default. compile: layers run through torch.compile, which
    fuses by itself and cannot trace custom autograd nodes.

    norm(x, weight, bias, eps, zero_centered_gamma); add_norm(x, residual, weight, ...) -> x + residual, which may
    overwrite x, and its norm. split_and_rotate, rotate: see ops/rotary.py. swiglu, geglu, bias_gelu: see
    ops/activations.py. cross_entropy: see ops/cross_entropy.py. adamw, sum_of_squares: see ops/adamw.py.
    accumulate: see ops.adamw.add_weight_gradient_.
    """

    chosen: Mapping[str, str] = field(default_factory=dict, hash=False)
    compile: bool = False
    norm: Norm = field(init=False, repr=False, compare=False)
    add_norm: AddNorm = field(init=False, repr=False, compare=False)
    split_and_rotate: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(
        init=False, repr=False, compare=False
    )
    rotate: Callable[..., tuple[Tensor, Tensor]] = field(init=False, repr=False, compare=False)
    swiglu: Callable[[Tensor], Tensor] = field(init=False, repr=False, compare=False)
    geglu: Callable[..., Tensor] = field(init=False, repr=False, compare=False)
    bias_gelu: Callable[..., Tensor] = field(init=False, repr=False, compare=False)
    adds_bias_with_gelu: bool = field(init=False, repr=False, compare=False)
    cross_entropy: ShardCrossEntropy = field(init=False, repr=False, compare=False)
    adamw: AdamW = field(init=False, repr=False, compare=False)
    sum_of_squares: Callable[[Sequence[Tensor]], Tensor] = field(init=False, repr=False, compare=False)
    accumulate: Callable[[Tensor, Tensor, Tensor], None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ours = {name: self.uses(name) for name in NAMES}
        glu = activations.compiled_swiglu if ours["glu"] else activations.swiglu
        if self.uses("glu", liger.LIGER) and not self.compile:
            glu = liger.swiglu
        norm = self._norm()
        slots: dict[str, Any] = {
            "norm": norm,
            "add_norm": self._add_norm(norm),
            "split_and_rotate": _split_and_rotate_compiled if ours["rotary"] else rotary.split_and_rotate,
            "rotate": _rotate_compiled if ours["rotary"] else rotary.rotate,
            "swiglu": glu,
            "geglu": activations.compiled_geglu if ours["glu"] else activations.geglu,
            "bias_gelu": activations.compiled_bias_gelu if ours["bias_gelu"] else activations.bias_gelu,
            # The compiled activation's backward also sums the bias gradient, without reading any more memory.
            "adds_bias_with_gelu": ours["bias_gelu"],
            "cross_entropy": COMPILED_CROSS_ENTROPY if ours["cross_entropy"] else TORCH_CROSS_ENTROPY,
            "adamw": self._adamw(),
            "sum_of_squares": (
                adamw.compiled_sum_of_squares if ours["sum_of_squares"] else adamw.sum_of_squares
            ),
            "accumulate": self._accumulate(),
        }
        for name, function in slots.items():
            object.__setattr__(self, name, function)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the description; another process builds the functions from it."""
        return type(self), (self.chosen, self.compile)

    def of(self, operator: str) -> str:
        """Return the name of an operator's implementation. Raises KeyError for an operator that does not exist."""
        if operator not in NAMES:
            raise KeyError(operator)
        return self.chosen.get(operator, TORCH)

    def uses(self, operator: str, implementation: str = COMPILED) -> bool:
        """Return whether this implementation is the chosen one."""
        return self.of(operator) == implementation

    @classmethod
    def all(cls, implementation: str, operators: Iterable[str] = NAMES) -> "Operators":
        """Choose one implementation for all of these operators."""
        return cls(dict.fromkeys(operators, implementation))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int | None = None,
        mask: Mask | CountedMask | None = None,
        documents: Documents | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        prefix: int = 0,
    ) -> Tensor:
        """Same as ops.attention.causal_attention, by the implementation chosen for attention of this form.

        Attention with a prefix and a window, documents or dropout is torch's: no kernel has all of a prefix visible.
        """
        chosen = self._attention(
            mask is not None, softcap is not None, documents is not None, window is not None
        )
        if prefix and (window is not None or documents is not None or mask is not None):
            chosen = TORCH
        if chosen == COMPILED and softcap is None and compiled_pays(query, key, window, documents, mask):
            return compiled_attention(
                query, key, value, window=window, mask=mask, documents=documents, scale=scale
            )
        return causal_attention(
            query,
            key,
            value,
            window=window,
            mask=mask,
            documents=documents,
            scale=scale,
            softcap=softcap,
            prefix=prefix,
            backend=chosen,
        )

    def documents(
        self,
        document_ids: Tensor,
        cu_seqlens: Tensor | None,
        *,
        dropout: bool,
        softcap: float | None,
        prefix: int = 0,
    ) -> Documents:
        """Return a micro batch's documents in the form that `attention` needs, made once for all layers.

        document_ids: [B, S]. cu_seqlens: the same documents, see ops.documents.row_cu_seqlens; without them the host
        waits for the ids on an accelerator. On an accelerator every kernel uses cu_seqlens; on a CPU each kernel has
        its own fastest form. prefix: virtual tokens in front of each row, for which every kernel takes a dense mask.
        """
        if prefix:
            return documents_seen(document_ids, prefix)
        if document_ids.device.type != "cpu":
            if cu_seqlens is None:
                return document_cu_seqlens(document_ids)
            return packed_cu_seqlens(cu_seqlens, document_ids.shape[1])
        if self._attention(dropout, softcap is not None, True, False) == COMPILED and softcap is None:
            return document_cu_seqlens(document_ids)
        # torch.compile needs fixed shapes, and materialised probabilities (dropout) need a dense mask.
        if self.compile or dropout:
            return documents_seen(document_ids)
        return document_spans(document_ids)

    def _attention(self, dropout: bool, softcap: bool, documents: bool, window: bool) -> str:
        if self.compile:
            return TORCH
        return self.of(
            attention_operator(dropout=dropout, softcap=softcap, documents=documents, window=window)
        )

    def _adamw(self) -> AdamW:
        if self.uses("adamw"):
            return adamw.compiled_adamw_
        return _adamw_by_apex if self.uses("adamw", apex.APEX) else adamw.adamw_

    def _accumulate(self) -> Callable[[Tensor, Tensor, Tensor], None]:
        if self.uses("accumulate"):
            return adamw.compiled_add_weight_gradient_
        if self.uses("accumulate", apex.APEX):
            return apex.add_weight_gradient_
        return adamw.add_weight_gradient_

    def _norm(self) -> Norm:
        if self.uses("norm"):
            return _norm_compiled
        if self.uses("norm", liger.LIGER) and not self.compile:
            return _norm_by_liger
        return norms.norm

    def _add_norm(self, norm: Norm) -> AddNorm:
        if not self.uses("add_norm"):
            return partial(_add_then_norm, norm)
        return partial(_add_norm_compiled, norm)


def attention_operator(*, dropout: bool, softcap: bool, documents: bool, window: bool) -> str:
    """Return the operator of NAMES for attention of this form: the first of dropout, soft cap, documents, window."""
    if dropout:
        return "attention_dropout"
    if softcap:
        return "attention_softcap"
    if documents:
        return "attention_documents"
    return "attention_windows" if window else "attention"


def _norm_compiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool
) -> Tensor:
    serves = not norms.why_not_compiled(weight.dtype, zero_centered_gamma=zero_centered_gamma)
    return (norms.compiled_norm if serves else norms.norm)(x, weight, bias, eps, zero_centered_gamma)


def _adamw_by_apex(tensors: AdamWTensors, rule: AdamWRule) -> None:
    """Update by Apex if all weights are float32, the only type it supports; else by torch."""
    serves = all(weight.dtype == torch.float32 for weight in tensors.weights)
    (apex.adamw_ if serves else adamw.adamw_)(tensors, rule)


def _norm_by_liger(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """Normalise by Liger's RMSNorm; by torch for 1 + weight, which Liger lacks, and LayerNorm, not a candidate."""
    if bias is not None or zero_centered_gamma:
        return norms.norm(x, weight, bias, eps, zero_centered_gamma)
    return liger.rms_norm(x, weight, eps)


def _add_then_norm(
    norm: Norm,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    total = x.add_(residual)
    return total, norm(total, weight, bias, eps, zero_centered_gamma)


def _add_norm_compiled(
    norm: Norm,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    if norms.why_not_compiled(weight.dtype, zero_centered_gamma=zero_centered_gamma):
        return _add_then_norm(norm, x, residual, weight, bias, eps, zero_centered_gamma)
    return norms.compiled_add_norm(x, residual, weight, bias, eps, zero_centered_gamma)


def _split_and_rotate_compiled(
    qkv: Tensor, heads: int, key_value_heads: int, cosines: Tensor, sines: Tensor, **form: Any
) -> tuple[Tensor, Tensor, Tensor]:
    whole = 2 * cosines.shape[-1] == qkv.shape[-1]
    run = rotary.compiled_split_and_rotate if whole else rotary.split_and_rotate
    return run(qkv, heads, key_value_heads, cosines, sines, **form)


def _rotate_compiled(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, **form: Any
) -> tuple[Tensor, Tensor]:
    whole = 2 * cosines.shape[-1] == query.shape[-1]
    return (rotary.compiled_rotate if whole else rotary.rotate)(query, key, cosines, sines, **form)


PLAIN_TORCH = Operators()
ALL_COMPILED = Operators.all(COMPILED)
