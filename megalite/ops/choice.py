"""The operators of a model: each declared once, with its implementations, and the choice of one for each.

No other file knows which implementation is used: modules call `ops.norm(...)`, `ops.attend(...)`. An
implementation serves every call: those that its kernel cannot serve go to plain torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor

from megalite.ops import activations, apex, liger, norms
from megalite.ops.activations import BiasGelu, GatedActivations
from megalite.ops.adamw import (
    AdamW,
    adamw_,
    add_weight_gradient_,
    compiled_adamw_,
    compiled_add_weight_gradient_,
    compiled_sum_of_squares,
)
from megalite.ops.adamw import sum_of_squares as squares_by_torch
from megalite.ops.attention import (
    causal_attention,
    compiled_attention,
    compiled_pays,
    document_cu_seqlens,
    document_spans,
    documents_seen,
)
from megalite.ops.attention_form import CAUSAL, AttentionForm
from megalite.ops.attention_sinks import attend_with_sinks
from megalite.ops.context_ring import BlockForm
from megalite.ops.cross_entropy import COMPILED_CROSS_ENTROPY, TORCH_CROSS_ENTROPY, ShardCrossEntropy
from megalite.ops.documents import CuSeqlens, Documents, packed_cu_seqlens
from megalite.ops.norms import AddNorm, Norm
from megalite.ops.packed_attention import why_not_packed
from megalite.ops.rotary import COMPILED_ROTARY, TORCH_ROTARY, Rotary

TORCH = "torch"
COMPILED = "megalite"
"""The library that setup.py builds from csrc/."""

Function = TypeVar("Function")


@dataclass(frozen=True)
class OperatorSlot:
    """An operator that a model uses.

    words: its name in messages. functions: implementation -> function, or a record of functions; an implementation
    without one has torch's. Empty for attention and experts' rows, where the implementation's name is bound.
    registered: the compiled library's operator. compiled, plain: a description of the two forms; all three are empty
    where another slot's cover this one.
    """

    words: str
    functions: Mapping[str, Any]
    registered: str
    compiled: str
    plain: str

    def bound(self, implementation: str, *, traced: bool) -> Any:
        """Return what an implementation gives. traced: by torch.compile, which cannot trace custom autograd nodes."""
        if traced and (implementation == liger.LIGER or not self.functions):
            implementation = TORCH
        return self.functions.get(implementation, self.functions[TORCH]) if self.functions else implementation


def _slot(
    words: str, functions: Mapping[str, Function], registered: str = "", compiled: str = "", plain: str = ""
) -> Function:
    """Declare an operator; typed as its functions, because `Operators` has those of the chosen one in its place."""
    return cast(Function, OperatorSlot(words, functions, registered, compiled, plain))


class OperatorSlots:
    """Each operator that a model uses, declared once; an `Operators` has the chosen functions in its place.

    norm(x, weight, bias, eps, zero_centered_gamma); add_norm(x, residual, weight, ...) -> x + residual, which may
    overwrite x, and its norm. attention, attention_* and expert_rows: the implementation's name, see `Operators.attend`
    and `ops.expert_rows`. Others: see their files.
    """

    norm: Norm = _slot(
        "RMSNorm, LayerNorm",
        {TORCH: norms.norm, COMPILED: norms.compiled_norm, liger.LIGER: liger.norm},
        "norm",
        "compiled, with the residual add before; plain torch for 1 + weight (Gemma) in bf16 and fp16, which round it",
        "torch's fused kernel on CUDA, else torch in a custom autograd function",
    )
    add_norm: AddNorm = _slot(
        "residual add + norm",
        {TORCH: norms.add_norm, COMPILED: norms.compiled_add_norm, liger.LIGER: norms.add_then(liger.norm)},
    )
    rotary: Rotary = _slot(
        "rotary embedding",
        {TORCH: TORCH_ROTARY, COMPILED: COMPILED_ROTARY},
        "rotary_split",
        "compiled, from the packed heads",
        "torch in a custom autograd function",
    )
    glu: GatedActivations = _slot(
        "SwiGLU, GeGLU",
        {TORCH: activations.TORCH_GLU, COMPILED: activations.COMPILED_GLU, liger.LIGER: liger.GLU},
        "glu",
        "compiled",
        "torch, SwiGLU in a custom autograd function",
    )
    bias_gelu: BiasGelu = _slot(
        "bias + GELU",
        {TORCH: activations.TORCH_BIAS_GELU, COMPILED: activations.COMPILED_BIAS_GELU},
        "bias_gelu",
        "compiled",
        "torch's GELU of the product with its bias",
    )
    expert_rows: str = _slot(
        "rows of experts",
        {},
        "expert_rows",
        "compiled: rows to experts and weighted sums back",
        "torch's look-ups and embedding bags",
    )
    cross_entropy: ShardCrossEntropy = _slot(
        "cross entropy",
        {TORCH: TORCH_CROSS_ENTROPY, COMPILED: COMPILED_CROSS_ENTROPY},
        "cross_entropy_statistics",
        "compiled, the gradient over the logits",
        "torch, over the logits",
    )
    attention: str = _slot(
        "causal attention",
        {},
        "attention_forward",
        "compiled with dropout, and on a CPU with windows, documents or AVX-512; else torch's; soft caps (Gemma 2) in "
        "plain torch",
        "torch's scaled_dot_product_attention",
    )
    attention_windows: str = _slot("attention in a sliding window", {})
    attention_documents: str = _slot("attention within documents", {})
    attention_dropout: str = _slot("attention with dropout", {})
    attention_softcap: str = _slot("soft-capped attention", {})
    adamw: AdamW = _slot(
        "AdamW and the rounded weights",
        {TORCH: adamw_, COMPILED: compiled_adamw_, apex.APEX: apex.adamw_},
        "adamw_",
        "compiled: norm, clipping, AdamW and the rounded weights",
        "torch's fused AdamW",
    )
    sum_of_squares: Callable[[Sequence[Tensor]], Tensor] = _slot(
        "gradient norm", {TORCH: squares_by_torch, COMPILED: compiled_sum_of_squares}
    )
    accumulate: Callable[[Tensor, Tensor, Tensor], None] = _slot(
        "gradient sums in float32",
        {
            TORCH: add_weight_gradient_,
            COMPILED: compiled_add_weight_gradient_,
            apex.APEX: apex.add_weight_gradient_,
        },
    )


SLOTS: Mapping[str, OperatorSlot] = {
    name: slot for name, slot in vars(OperatorSlots).items() if isinstance(slot, OperatorSlot)
}
"""Operator -> its declaration."""


@dataclass(frozen=True)
class Operators(OperatorSlots):
    """A model's operators, built from the name of each operator's implementation.

    chosen: operator of SLOTS -> implementation; torch by default. compile: layers run through torch.compile, which
    fuses by itself.
    """

    chosen: Mapping[str, str] = field(default_factory=dict, hash=False)
    compile: bool = False

    def __post_init__(self) -> None:
        for name, slot in SLOTS.items():
            object.__setattr__(self, name, slot.bound(self.of(name), traced=self.compile))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the description; another process builds the functions from it."""
        return type(self), (self.chosen, self.compile)

    def of(self, operator: str) -> str:
        """Return the name of an operator's implementation. Raises KeyError for an operator that does not exist."""
        if operator not in SLOTS:
            raise KeyError(operator)
        return self.chosen.get(operator, TORCH)

    def uses(self, operator: str, implementation: str = COMPILED) -> bool:
        """Return whether this implementation is the chosen one."""
        return self.of(operator) == implementation

    @classmethod
    def all(cls, implementation: str, operators: Iterable[str] = SLOTS) -> "Operators":
        """Choose one implementation for all of these operators."""
        return cls(dict.fromkeys(operators, implementation))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = CAUSAL) -> Tensor:
        """Same as ops.attention.causal_attention, by the implementation chosen for attention of this form.

        Attention with a prefix and a window, documents or dropout is torch's: no kernel has all of a prefix visible.
        """
        if form.sinks is not None:
            assert form.documents is None or isinstance(form.documents, CuSeqlens)
            of_keys = None if form.documents is None else form.documents.of_keys
            blocks = self.blocks(query, form._replace(documents=of_keys, sinks=None), key.shape[1])
            return attend_with_sinks(query, key, value, form.sinks, blocks)
        dropout, capped = form.mask is not None, form.softcap is not None
        documents, window = form.documents is not None, form.window is not None
        chosen = self._attention_form(dropout, capped, documents, window)
        if form.prefix and (window or documents or dropout):
            chosen = TORCH
        if chosen == COMPILED and not capped and compiled_pays(query, key, form):
            return compiled_attention(query, key, value, form)
        return causal_attention(query, key, value, form, backend=chosen)

    def blocks(self, query: Tensor, form: AttentionForm, length: int) -> BlockForm:
        """Return how attention of this form over rows of `length` positions is computed block by block.

        query: a tensor like those of the blocks. form: documents as cu_seqlens. Blocks need log-sum-exps, which torch's
        kernels do not have on every device: where the compiled operator is not chosen they are computed in plain torch.
        """
        dropout, capped = form.mask is not None, form.softcap is not None
        chosen = self._attention_form(dropout, capped, form.documents is not None, form.window is not None)
        compiled = chosen == COMPILED and not capped and not why_not_packed(query, dropout=dropout)
        return BlockForm(form, len(query), length, compiled)

    def documents(
        self,
        document_ids: Tensor,
        cu_seqlens: Tensor | None,
        *,
        max_seqlen: int | None = None,
        dropout: bool,
        softcap: float | None,
        prefix: int = 0,
    ) -> Documents:
        """Return a micro batch's documents in the form that `attention` needs, made once for all layers.

        document_ids: [B, S]. cu_seqlens: the same documents, see ops.documents.row_cu_seqlens; without them the host
        waits for the ids on an accelerator. max_seqlen: at least the tokens of the longest one; default: S. On an
        accelerator every kernel uses cu_seqlens; on a CPU each kernel has its own fastest form. prefix: virtual tokens
        in front of each row, for which every kernel takes a dense mask.
        """
        if prefix:
            return documents_seen(document_ids, prefix)
        if document_ids.device.type != "cpu":
            return self.block_documents(document_ids, cu_seqlens, max_seqlen)
        if self._attention_form(dropout, softcap is not None, True, False) == COMPILED and softcap is None:
            return document_cu_seqlens(document_ids)
        # torch.compile needs fixed shapes, and materialised probabilities (dropout) need a dense mask.
        if self.compile or dropout:
            return documents_seen(document_ids)
        return document_spans(document_ids)

    def block_documents(
        self, document_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> CuSeqlens:
        """Same as `documents`, in the form that `blocks` needs."""
        if cu_seqlens is None:
            return document_cu_seqlens(document_ids)
        # torch.compile would compile a layer again for each new number.
        return packed_cu_seqlens(cu_seqlens, document_ids.shape[1], None if self.compile else max_seqlen)

    def _attention_form(self, dropout: bool, softcap: bool, documents: bool, window: bool) -> str:
        """Return the implementation for attention of this form: the first of dropout, soft cap, documents, window."""
        if dropout:
            return self.attention_dropout
        if softcap:
            return self.attention_softcap
        if documents:
            return self.attention_documents
        return self.attention_windows if window else self.attention


PLAIN_TORCH = Operators()
ALL_COMPILED = Operators.all(COMPILED)
