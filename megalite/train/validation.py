"""The loss on held-out text: each sequence counted once, the same number in every layout."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch

from megalite.data.batches.loader import StepLoader
from megalite.data.batches.megatron_loader import MegatronLoader
from megalite.data.files.token_file import TokenFile
from megalite.errors import DataError
from megalite.launcher.control.progress import Activity, progress
from megalite.monitor.metrics import ValidationMetrics

if TYPE_CHECKING:
    from megalite.train.step.train_step import TrainStep


@dataclass(frozen=True)
class HeldOutSet:
    """A validation set: losses are summed over the first `samples` samples of `loader`.

    The loader's `epochs` end there, so the rows that fill up the last batch have no labels and add nothing.
    every: each validation has the next `samples` samples, as Megatron's does after so many steps; None: the same ones.
    """

    loader: StepLoader | MegatronLoader
    samples: int
    every: int | None = None

    @property
    def steps(self) -> int:
        return math.ceil(self.samples / self.loader.global_batch_size)

    def first_sample(self, step: int) -> int:
        """Return the place of the first sample of the validation after a step."""
        return 0 if self.every is None else max(0, math.ceil(step / self.every) - 1) * self.samples


def held_out_set(load: Callable[..., StepLoader], file: TokenFile, limit: int | None) -> HeldOutSet:
    """Return all samples of a file in order, or `limit` random ones, the same in every validation of the run.

    load: `loaders.loader_maker`'s.
    """
    whole = load(file, shuffle=False, epochs=1)
    if limit is None or limit >= whole.samples_per_epoch:
        return HeldOutSet(whole, whole.samples_per_epoch)
    return HeldOutSet(load(file, shuffle=True, epochs=Fraction(limit, whole.samples_per_epoch)), limit)


def validate(
    trainer: "TrainStep",
    sets: Mapping[str, HeldOutSet],
    ends: Callable[[], bool] = lambda: False,
    advance: Callable[[], None] = lambda: None,
) -> ValidationMetrics | None:
    """Evaluate the trainer's model on the sets; collective over the world, and without effect on the training.

    ends: asked before every batch, and the same on every rank; once true, the validation stops and returns None.
    advance: called after every batch. Raises DataError if a set has no token to predict.
    """
    progress.begin(Activity.VALIDATING)
    started = time.perf_counter()
    names = trainer.objective.figures
    totals, means = [0.0] * (2 + len(names)), {}
    for name, held_out in sets.items():
        sums = torch.zeros(2 + len(names), dtype=torch.float64, device=trainer.mesh.device)
        stride, first = held_out.loader.global_batch_size, held_out.first_sample(trainer.state.step)
        with trainer.prefetch(held_out.loader, end=first + held_out.steps * stride) as batches:
            for step in range(held_out.steps):
                if ends():
                    return None
                sums += trainer.evaluate(batches.step_batch(first + step * stride).ready())
                advance()
        of_set = sums.tolist()  # the only wait for the device
        if of_set[1] == 0:
            raise DataError(
                f"the validation set {name} has no token to predict; name another text as data.validation"
            )
        means[name] = of_set[0] / of_set[1]
        totals = [one + other for one, other in zip(totals, of_set, strict=True)]
    total, weight, *figures = totals
    return ValidationMetrics(
        trainer.state.step,
        total / weight,
        weight,
        time.perf_counter() - started,
        means,
        {name: figure / weight for name, figure in zip(names, figures, strict=True)},
    )
