"""Activation memory by the formulas of Korthikanti et al., "Reducing activation recomputation in large Transformer
models", 2022, for their model: 16-bit activations, GELU, an MLP of four times the hidden size, dropout masks of one
byte, and attention whose probabilities are kept.

The bytes of a layer are added up tensor by tensor, as in the paper's section 4; the tests hold the sums against its
equations. planner/activations.py says what megalite keeps.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megalite.config.sections.training_section import RecomputeMode

# How a tensor is cut: not at all, over the sequence with sequence parallelism, or over the tensor-parallel ranks.
_Cut = Literal["sequence", "tensor"]


class _SavedTensor(NamedTuple):
    """bytes_per_value: for each of the sequence x micro batch x hidden values; of the attention core for each score."""

    name: str
    bytes_per_value: int
    cut: _Cut


_LAYER = (
    _SavedTensor("input of the first layer norm", 2, "sequence"),
    _SavedTensor("input of query, key and value", 2, "sequence"),
    _SavedTensor("query and key", 4, "tensor"),
    _SavedTensor("value", 2, "tensor"),
    _SavedTensor("input of the attention's projection", 2, "tensor"),
    _SavedTensor("mask of the attention's dropout", 1, "sequence"),
    _SavedTensor("input of the second layer norm", 2, "sequence"),
    _SavedTensor("input of the MLP", 2, "sequence"),
    _SavedTensor("input of the GELU", 8, "tensor"),
    _SavedTensor("output of the GELU", 8, "tensor"),
    _SavedTensor("mask of the MLP's dropout", 1, "sequence"),
)
# Softmax output and dropout output of 2 bytes, mask of 1: heads x sequence^2 x micro batch values.
_BYTES_PER_SCORE = 2 + 2 + 1


@dataclass(frozen=True)
class PublishedModel:
    """A model in the paper's letters: a, h, L, s, v, and b, the micro batch."""

    heads: int
    hidden: int
    layers: int
    sequence: int
    vocabulary: int
    micro_batch: int

    @property
    def values(self) -> int:
        """sbh."""
        return self.sequence * self.micro_batch * self.hidden


def published_layer_bytes(
    model: PublishedModel, recompute: RecomputeMode, *, tensor: int = 1, sequence_parallel: bool = False
) -> float:
    """Return the bytes that one layer keeps of a micro batch (equations 1, 2, 4 and 6)."""
    if recompute == "full":
        # The paper's figure of 2sbhL: only the layer's input, on every rank.
        return 2.0 * model.values
    shares = {"sequence": tensor if sequence_parallel else 1, "tensor": tensor}
    layer = sum(model.values * saved.bytes_per_value / shares[saved.cut] for saved in _LAYER)
    if recompute == "selective":
        return layer
    scores = model.heads * model.sequence**2 * model.micro_batch
    return layer + _BYTES_PER_SCORE * scores / tensor


def published_first_stage_bytes(
    model: PublishedModel,
    recompute: RecomputeMode,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    pipeline: int = 1,
    chunks: int = 1,
) -> float:
    """Return the bytes of the first stage (equation 5 and section 4.3).

    The first stage of 1F1B has `pipeline` micro batches in flight, which is all layers of the model for one; with
    `chunks` interleaved chunks 1 + (pipeline - 1) / (pipeline x chunks) times as much. Beside the layers: the mask of
    the embedding's dropout for each of them, and without a pipeline the last norm, the head's input and float32 logits.
    """
    layer = published_layer_bytes(model, recompute, tensor=tensor, sequence_parallel=sequence_parallel)
    interleaved = 1 + (pipeline - 1) / (pipeline * chunks) if chunks > 1 else 1
    share = tensor if sequence_parallel else 1
    masks = model.values * pipeline / share
    ends = 0.0
    if pipeline == 1:
        logits = 4 * model.sequence * model.micro_batch * model.vocabulary / tensor
        ends = 4 * model.values / share + logits
    return layer * model.layers * interleaved + masks + ends
