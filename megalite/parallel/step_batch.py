"""The samples that one data-parallel rank computes in one step, and how a model computes them."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from torch import Tensor

from megalite.parallel.lora_bank import NO_ADAPTER, Selection


@dataclass(frozen=True)
class StepBatch:
    """The samples of one data-parallel rank in one step: M micro batches of b sequences, stacked, [M * b, S] each.

    sample_indices: [M * b] int64, the index of each row in the run's order of samples: equal in every layout, never
    repeated.
    document_ids: int64, ascending in a row; if given, tokens attend within their own document only.
    cu_seqlens: [M * b, documents] int32, the same documents for an accelerator (ops.documents.row_cu_seqlens): each
    document's start in its row; S for padding documents without tokens.
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
    reference: Tensor | None = field(default=None, kw_only=True)
    row_weights: Tensor | None = field(default=None, kw_only=True)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the batch has, by name."""
        tensors = {each.name: getattr(self, each.name) for each in fields(StepBatch)}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "StepBatch":
        """Return the batch with `change` applied to each tensor."""
        return StepBatch(**{name: change(tensor) for name, tensor in self.tensors.items()})

    def micro_batches(self, count: int) -> list["StepBatch"]:
        pieces = {name: tensor.chunk(count) for name, tensor in self.tensors.items()}
        return [StepBatch(**{name: each[index] for name, each in pieces.items()}) for index in range(count)]


@dataclass(frozen=True)
class ForwardMode:
    """How chunks compute a micro batch.

    training: with dropout and all terms of the loss. adapters: those of the tokens; None: the model's own.
    """

    training: bool = True
    adapters: Selection | None = None


TRAINING, EVALUATION = ForwardMode(), ForwardMode(training=False)
WITHOUT_ADAPTER = ForwardMode(training=False, adapters=NO_ADAPTER)
