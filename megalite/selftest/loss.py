"""Cross entropy over the logits of one rank."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.choice import COMPILED, Operators
from megalite.parallel.cross_entropy import (
    IGNORE_INDEX,
    LossTerms,
    VocabularyShard,
    vocab_parallel_cross_entropy,
)
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest.registry import Entry, Form, Shape, compiled


def _make(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return logits [tokens, vocabulary], labels (the last one is ignored), and weights, one of them 0."""
    logits = 4 * random(*shape)
    labels = torch.arange(shape[0], device=logits.device).mul_(7919).remainder_(shape[1])
    labels[-1] = IGNORE_INDEX
    weights = torch.ones(shape[0], dtype=torch.promote_types(dtype, torch.float32), device=logits.device)
    weights[shape[0] // 2] = 0
    return [logits, labels, weights]


def _losses(operators: Operators) -> Form:
    """Return the form that computes losses through the model's own function."""

    def form(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        mesh, columns = ParallelMesh.single(logits.device), logits.shape[-1]
        rows, ids, masks = (each.unsqueeze(0) for each in (logits, labels, weights))
        shard = VocabularyShard(range(columns), mesh.tp, operators.cross_entropy)
        losses = vocab_parallel_cross_entropy(rows, ids, masks, shard, LossTerms(columns))
        return losses.squeeze(0)

    return form


def plain_losses(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    in_fp32 = logits.to(weights.dtype)
    return F.cross_entropy(in_fp32, labels, ignore_index=IGNORE_INDEX, reduction="none") * weights


ENTRIES = [
    Entry(
        name="cross entropy",
        operator="cross_entropy",
        make=_make,
        plain=plain_losses,
        form_of=_losses,
        candidates={COMPILED: compiled("cross_entropy_statistics", "cross_entropy_gradient_")},
        gradients=1,
        shapes=((1, 2), (5, 33), (7, 1030), (3, 50257)),
        own=lambda run: (run.tokens, run.vocabulary),
    ),
]
