"""StepContext: the inputs of every layer in one micro batch beside the hidden states."""

from dataclasses import dataclass

from torch import Tensor

from megalite.model.dropout import DropoutContext
from megalite.model.kv_cache import CachedStep
from megalite.model.rope import Rotations
from megalite.ops.documents import Documents
from megalite.ops.router import RealTokens
from megalite.parallel.context import ContextRows
from megalite.parallel.lora_bank import Selection


@dataclass(frozen=True)
class StepContext:
    """Shared by all layers of a chunk during one micro batch.

    rotation: the rotary angles of its positions; None: the model has none. dropout: which samples and positions
    they are, to draw masks from; None: nothing is dropped. cache: where the tokens stand in the cache, in generation.
    documents: tokens attend within their own document only. adapters: those of the tokens; None: the model's own.
    rows: how they are cut over context-parallel ranks; None: they are not.
    router_scale: the gradient of each sequence's router losses; None: they are not computed. real_tokens: those that
    routers count; None: all.
    prefix_tokens: the virtual tokens in front of each sequence. prefix: the output [tokens, projection] of the trunk
    from which layers compute their prefixes; None: there is none.
    """

    rotation: Rotations | None = None
    dropout: DropoutContext | None = None
    cache: CachedStep | None = None
    documents: Documents | None = None
    adapters: Selection | None = None
    rows: ContextRows | None = None
    router_scale: float | None = None
    real_tokens: RealTokens | None = None
    prefix_tokens: int = 0
    prefix: Tensor | None = None

    @property
    def begins(self) -> bool:
        """True if a sequence of this micro batch begins with it."""
        return self.cache is None or self.cache.begins

    def gathered(self, values: Tensor) -> Tensor:
        """Return the values of the tokens of all context-parallel ranks, each once, from this rank's [B, S, ...]."""
        cut = self.cache or self.rows
        return values if cut is None else cut.gathered(values)

    def own(self, values: Tensor) -> Tensor:
        """Invert `gathered`: return the values of this rank's tokens."""
        cut = self.cache or self.rows
        return values if cut is None else cut.own(values)


EMPTY_CONTEXT = StepContext()
