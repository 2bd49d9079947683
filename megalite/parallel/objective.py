"""Objectives: the loss of a micro batch as a function of the loss sum of each of its rows."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.cross_entropy import IGNORE_INDEX
from megalite.parallel.step_batch import StepBatch


class Objective(Protocol):
    """A mean over the global batch that a step minimises, the same for any split of the batch."""

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of what is reported besides the loss."""
        ...

    @property
    def of_rows(self) -> bool:
        """Whether the loss is a function of whole rows, so that ranks with parts of a row add theirs first."""
        ...

    def weight(self, batch: StepBatch) -> Tensor:
        """Return the weight of these rows in the mean, [] float64."""
        ...

    def weighted(self, batch: StepBatch, factor: Tensor) -> StepBatch:
        """Return the batch whose `loss` is `factor` times as large."""
        ...

    def loss(self, row_losses: Tensor, micro_batch: StepBatch) -> Tensor:
        """Return the weighted sum of the losses of a micro batch, a scalar.

        row_losses: the last chunk's output [b], with `of_rows` of whole rows. micro_batch: with its whole rows.
        """
        ...

    def figure_sums(self, row_losses: Tensor, micro_batch: StepBatch) -> Tensor:
        """Return the weighted sum of each figure, [figures] float64, outside of autograd."""
        ...


class NextToken:
    """The mean cross entropy of the tokens, weighted by the loss mask."""

    figures = ()
    of_rows = False

    def weight(self, batch: StepBatch) -> Tensor:
        return batch.loss_mask.double().masked_fill(batch.labels == IGNORE_INDEX, 0).sum()

    def weighted(self, batch: StepBatch, factor: Tensor) -> StepBatch:
        # Scaling the loss would cost a pass over the logits.
        return replace(batch, loss_mask=batch.loss_mask.double() * factor)

    def loss(self, row_losses: Tensor, micro_batch: StepBatch) -> Tensor:
        return row_losses.sum()

    def figure_sums(self, row_losses: Tensor, micro_batch: StepBatch) -> Tensor:
        return row_losses.new_empty(0, dtype=torch.float64)


NEXT_TOKEN = NextToken()


@dataclass(frozen=True)
class Preference:
    """The mean over pairs of rows, a chosen and then a rejected answer, of a loss of their rewards.

    An answer's reward is beta times the logarithm of how much more probable the model makes it than the reference does.
    "sigmoid": -log sigmoid(the chosen reward minus the rejected one) (Rafailov et al., "Direct Preference
    Optimization", 2023). label_smoothing: the probability that a pair's labels are swapped (Mitchell, "A note on DPO
    with noisy preferences", 2023).
    "ipo": (h - 1 / (2 beta))^2, where h is that difference for beta = 1, with the mean over an answer's tokens in
    place of the sum (Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences",
    2023).

    A batch carries `reference`, and a loss mask of ones. A pair without labels has no weight.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    kind: Literal["sigmoid", "ipo"] = "sigmoid"

    @property
    def figures(self) -> tuple[str, ...]:
        """reward_accuracy: the share of pairs with the larger reward for the chosen answer. reward_margin: the mean
        difference of the two rewards."""
        return ("reward_accuracy", "reward_margin")

    @property
    def of_rows(self) -> bool:
        return True

    def weight(self, batch: StepBatch) -> Tensor:
        return _with_labels(batch).double().sum()

    def weighted(self, batch: StepBatch, factor: Tensor) -> StepBatch:
        return replace(batch, row_weights=factor.double().expand(len(batch.labels)))

    def loss(self, row_losses: Tensor, micro_batch: StepBatch) -> Tensor:
        difference = self._difference(row_losses, micro_batch)
        if self.kind == "ipo":
            losses = (difference - 1 / (2 * self.beta)).square()
        else:
            margin = self.beta * difference
            losses = -F.logsigmoid(margin)
            if self.label_smoothing:
                swapped = -F.logsigmoid(-margin)
                losses = losses * (1 - self.label_smoothing) + swapped * self.label_smoothing
        return (losses * _weights(micro_batch)).sum()

    def figure_sums(self, row_losses: Tensor, micro_batch: StepBatch) -> Tensor:
        difference = self._difference(row_losses.detach(), micro_batch)
        figures = torch.stack(((difference > 0).double(), self.beta * difference))
        return (figures * _with_labels(micro_batch)).sum(dim=1)

    def _difference(self, row_losses: Tensor, micro_batch: StepBatch) -> Tensor:
        """Return log(p / reference of the chosen answer) - log(p / reference of the rejected one), [pairs] float64."""
        if micro_batch.reference is None:
            raise ValueError("a preference loss needs the reference's losses of each row")
        ratios = micro_batch.reference - row_losses.double()
        if self.kind == "ipo":
            ratios = ratios / (micro_batch.labels != IGNORE_INDEX).sum(dim=1).clamp(min=1)
        chosen, rejected = ratios.view(-1, 2).unbind(dim=1)
        return chosen - rejected


def _with_labels(batch: StepBatch) -> Tensor:
    """Return which pairs have labels, [pairs] bool; those after the end of the data have none."""
    return (batch.labels[::2] != IGNORE_INDEX).any(dim=1)


def _weights(batch: StepBatch) -> Tensor:
    """Return the weight of each pair, [pairs]."""
    weights = _with_labels(batch).double()
    return weights if batch.row_weights is None else weights * batch.row_weights[::2]
