"""The samples that one data-parallel rank computes in one step, and how a model computes them."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from megalite.parallel.lora_bank import NO_ADAPTER, Selection


@dataclass(frozen=True)
class StepBatch:
    """The samples of one data-parallel rank in one step: M micro batches of b sequences, stacked, [M * b, S] each.

    sample_indices: [M * b] int64, the index of each row in the run's order of samples: equal in every layout, never
    repeated.
    document_ids: int64, ascending in a row; if given, tokens attend within their own document only.
    cu_seqlens: [M * b, documents] int32, the same documents for an accelerator (ops.documents.row_cu_seqlens): each
    document's start in its row; S for padding documents without tokens. max_seqlen: at least the tokens of the longest
    one.
    blocks: [M * b, blocks] int64, in host memory always: how each row is cut over context-parallel ranks
    (parallel/context.py); None: zig-zag.
    lengths: [M * b] int64, the positions of each row that hold a token, in front of its padding; None: all of them.
    reference, row_weights: [M * b] float64, for preferences: each row's loss sum under the reference model, and its
    weight in the loss.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    sample_indices: Tensor
    document_ids: Tensor | None = field(default=None, kw_only=True)
    cu_seqlens: Tensor | None = field(default=None, kw_only=True)
    max_seqlen: int | None = field(default=None, kw_only=True)
    blocks: Tensor | None = field(default=None, kw_only=True)
    lengths: Tensor | None = field(default=None, kw_only=True)
    reference: Tensor | None = field(default=None, kw_only=True)
    row_weights: Tensor | None = field(default=None, kw_only=True)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the batch has, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(StepBatch)}
        return {name: tensor for name, tensor in values.items() if isinstance(tensor, Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> "StepBatch":
        """Return the batch with `change` applied to each tensor."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors.items()}
        return replace(self, **changed)

    def on_device(self, copy: Callable[[Tensor], Tensor]) -> "StepBatch":
        """Return the batch with `copy` applied to each tensor but `blocks`, which the host reads."""
        return replace(replace(self, blocks=None).map(copy), blocks=self.blocks)

    def micro_batches(self, count: int) -> list["StepBatch"]:
        pieces = {name: tensor.chunk(count) for name, tensor in self.tensors.items()}
        each: list[dict[str, Any]] = [
            {name: of_all[index] for name, of_all in pieces.items()} for index in range(count)
        ]
        return [replace(self, **tensors) for tensors in each]


@dataclass(frozen=True)
class ForwardMode:
    """How chunks compute a micro batch.

    training: with dropout and all terms of the loss. adapters: those of the tokens; None: the model's own.
    router_scale: the gradient of each sequence's router losses, where a mixture has them; None: they are not computed.
    """

    training: bool = True
    adapters: Selection | None = None
    router_scale: float | None = None


TRAINING, EVALUATION = ForwardMode(), ForwardMode(training=False)
WITHOUT_ADAPTER = ForwardMode(training=False, adapters=NO_ADAPTER)
