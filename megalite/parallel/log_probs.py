"""Log-probabilities of given tokens, and whether each is the most likely one, from vocabulary-parallel logits."""

import torch
from torch import Tensor

from megalite.parallel.collectives import gather_ranks
from megalite.parallel.mesh import RankGroup


def vocab_parallel_log_probs(
    logits: Tensor, labels: Tensor, rows: range, tp: RankGroup
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T] and bool [T], True where argmax would choose the label; equal on all ranks of tp.

    logits: [T, V / tp], of the rows of the vocabulary that this rank holds; labels: [T]. Computes in at least float32,
    outside autograd; the logits are never gathered.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    maximum, column = logits.max(dim=-1)
    sums = (logits - maximum.unsqueeze(-1)).exp().sum(dim=-1)
    here = (labels >= rows.start) & (labels < rows.stop)
    local = torch.where(here, labels - rows.start, 0).unsqueeze(-1)
    expected = torch.where(here, logits.gather(-1, local).squeeze(-1), -torch.inf)
    maxima, sums_of_ranks, expected_of_ranks = gather_ranks(
        torch.stack([maximum, sums, expected]), tp
    ).unbind(1)
    ids = gather_ranks(column + rows.start, tp)
    largest, winner = maxima.max(dim=0)
    total = (sums_of_ranks * (maxima - largest).exp()).sum(dim=0)
    log_probs = expected_of_ranks.amax(dim=0) - largest - total.log()
    return log_probs, ids.gather(0, winner.unsqueeze(0)).squeeze(0) == labels
