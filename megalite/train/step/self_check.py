"""The self-check of a run: its copies of weights and optimizer state must be equal, or a host or card corrupts data."""

from collections.abc import Iterator
from pathlib import Path

from megalite.errors import TrainingError, listed
from megalite.parallel.copies import Copy, CopyCheck, Difference
from megalite.train.step.train_step import TrainStep


def compare_copies(trainer: TrainStep) -> Difference | None:
    """Return the first tensor whose copies differ, the same on every rank. Collective.

    With ZeRO no two data-parallel ranks have the same optimizer state: weights alone are compared; with ZeRO 3 nothing.
    """
    if trainer.config.zero_stage == 3:
        return None
    return CopyCheck(_copies(trainer), trainer.mesh).first_difference()


def cause(difference: Difference, trainer: TrainStep, saved: Path | None) -> TrainingError:
    """Return the error that ends a run whose copies differ. saved: the last published checkpoint."""
    return TrainingError(f"step {trainer.state.step}: {_describe(difference, trainer)}; {_remedy(saved)}")


def _copies(trainer: TrainStep) -> Iterator[Copy]:
    tensors = trainer.replica.tensors
    for parameter in trainer.replica.parameters:
        yield Copy(parameter, tensors[parameter.name])
    if trainer.config.zero_stage == 0:
        for shard in trainer.optimizer.state.shards():
            shape = trainer.mesh.local_shape(shard.parameter)
            yield Copy(shard.parameter, shard.values.view(shape), shard.key)


def _describe(difference: Difference, trainer: TrainStep) -> str:
    layout = trainer.config.layout
    suspects = listed([layout.describe(rank) for rank in sorted(difference.ranks)])
    others = f", as do those of {difference.others} other tensors" if difference.others else ""
    if difference.ranks == difference.holders:
        where = f"on {suspects}, and no copy has a majority"
    else:
        where = f"on {suspects}, where it is not that of {len(difference.holders) - len(difference.ranks)} other ranks"
    return f"the copies of {difference.name} differ{others}: {where} (monitor.self_check_every)"


def _remedy(saved: Path | None) -> str:
    kept = "no checkpoint was written before" if saved is None else f"{saved} was written before and is kept"
    return (
        f"a memory or a card corrupts data there, or a callback changes weights on some ranks; {kept}; test or leave"
        " out that host, then run the same command to resume"
    )
