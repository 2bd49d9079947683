"""The records that only some steps make: the norms of each layer, and the end of an epoch."""

from megalite.config.sections.schema import RunConfig
from megalite.data.batches.stream_loader import StreamLoader, TrainingLoader
from megalite.model.replica import Replica
from megalite.ops.choice import Operators
from megalite.train.optimizer.update_norms import UpdateNorms
from megalite.train.step.options import optimizer_settings


def norms_of(config: RunConfig, replica: Replica, step: int, ops: Operators) -> UpdateNorms | None:
    """Return the empty record of the norms of a step; None if monitor.layers_every does not ask for them."""
    every = config.monitor.layers_every
    if every == 0 or step % every:
        return None
    return UpdateNorms(replica.shape, optimizer_settings(config).groups, replica.mesh, ops=ops)


def ended_epoch(config: RunConfig, loader: TrainingLoader, before: int, after: int) -> int | None:
    """Return the last epoch, counted from 1, that ends between two numbers of samples; None: none, or a run of steps.

    before, after: the samples that the run has trained on before and after a step.
    """
    if config.training.steps or isinstance(loader, StreamLoader):
        return None
    ended, epoch = None, max(1, before // loader.samples_per_epoch)
    while not loader.steps_for_epochs(epoch, after=after):
        ended = epoch if loader.steps_for_epochs(epoch, after=before) else None
        epoch += 1
    return ended
