"""AttentionForm: what queries see, and how scores become probabilities."""

from typing import NamedTuple

from torch import Tensor

from megalite.ops.documents import Documents
from megalite.ops.dropout import CountedMask, Mask


class AttentionForm(NamedTuple):
    """What `ops.attention.causal_attention` computes; by default plain causal attention.

    window: the number of keys that a position sees, its own included (Beltagy et al. 2020); None: all up to its own.
    documents: a position sees only keys of its own document; spans cannot be combined with `mask`. With T > S each form
    says which keys stand before the queries.
    mask: the dropout mask of the probabilities, [B, heads, S, T]; the compiled operator draws a CountedMask on the fly.
    scale: 1 / sqrt(D) by default. softcap: scores become softcap * tanh(score / softcap).
    prefix: every position sees the first `prefix` keys, whatever the window; documents are then a mask with these keys.
    sinks: [heads], a logit of each head beside its scores, which takes its share of each softmax and adds nothing to
    the output; without a prefix, and with documents as cu_seqlens. `Operators.attend` alone computes them.
    """

    window: int | None = None
    documents: Documents | None = None
    mask: Mask | CountedMask | None = None
    scale: float | None = None
    softcap: float | None = None
    prefix: int = 0
    sinks: Tensor | None = None

    def factor(self, head_dim: int) -> float:
        """Return the scale, for heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale

    @property
    def window_size(self) -> tuple[int, int]:
        """The keys before and after its own position that a query sees, -1: all; as variable-length kernels take it."""
        return (-1 if self.window is None else self.window - 1, 0)


CAUSAL = AttentionForm()
