"""Cross entropy: our compiled operators against eager torch, torch.compile and our own plain form.

    python -m benchmarks.kernels_cross_entropy [--quick]

Losses of float32 logits and the gradient of their sum, on two threads. Ours write it over the logits; torch's goes to
new memory. "rewritten" multiplies the logits in place: it reads and writes each once, which nothing that makes a
gradient can do without, so that "rewritten / fused" is the share of the memory's rate that ours reach.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_timing import Case, run
from megalite.ops.cross_entropy import COMPILED_CROSS_ENTROPY, TORCH_CROSS_ENTROPY, ShardCrossEntropy
from megalite.parallel.cross_entropy import LossTerms, VocabularyShard, vocab_parallel_cross_entropy
from megalite.parallel.mesh import ALONE

TARGETS = {"eager": 3.0, "compiled": 4.0}


def _forms(tokens: int, vocabulary: int, label_smoothing: float = 0.0) -> Mapping[str, Callable[[], Any]]:
    logits = torch.randn(1, tokens, vocabulary, requires_grad=True)
    labels, loss_mask = torch.randint(vocabulary, (1, tokens)), torch.ones(1, tokens)

    def torchs(logits: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=label_smoothing
        )

    def ours(logits: Tensor, *, operator: ShardCrossEntropy) -> Tensor:
        shard, terms = (
            VocabularyShard(range(vocabulary), ALONE, operator),
            LossTerms(vocabulary, label_smoothing),
        )
        return vocab_parallel_cross_entropy(logits, labels, loss_mask, shard, terms).sum()

    def once(loss: Callable[[Tensor], Tensor]) -> Any:
        return torch.autograd.grad(loss(logits), logits)

    forms = {
        "eager": torchs,
        "compiled": torch.compile(torchs),
        "plain": partial(ours, operator=TORCH_CROSS_ENTROPY),
        "fused": partial(ours, operator=COMPILED_CROSS_ENTROPY),
    }
    timed = {name: partial(once, loss) for name, loss in forms.items()}
    return timed | {"rewritten": lambda: logits.detach().mul_(1.0)}


def _case(tokens: int, vocabulary: int, label_smoothing: float = 0.0, **targets: float) -> Case:
    name = f"{tokens} tokens, {vocabulary} ids" + (", label smoothing" if label_smoothing else "")
    moved = 2 * torch.float32.itemsize * tokens * vocabulary
    return Case(name, partial(_forms, tokens, vocabulary, label_smoothing), targets, moved)


CASES = [
    _case(4096, 32000, **TARGETS),
    # As much memory as 4096 tokens of 32000 ids: larger tensors torch would have from the system anew every time.
    _case(1024, 131072, **TARGETS),
    _case(512, 32000, **TARGETS),
    _case(512, 32000, label_smoothing=0.1),
]

if __name__ == "__main__":
    run("kernels-cross-entropy", __doc__, CASES)
