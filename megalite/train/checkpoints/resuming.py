"""Where a start of a run goes on: from the checkpoint that the settings name, or from a newer copy in memory."""

from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.load import intact_instead
from megalite.config.sections.schema import RunConfig
from megalite.data.ensure import RunData
from megalite.errors import CheckpointError
from megalite.monitor.console import complain
from megalite.parallel.mesh import ParallelMesh
from megalite.train.checkpoints.memory_copies import MemoryCopies, memory_copies
from megalite.train.checkpoints.resume_check import ResumeCheck
from megalite.train.step.train_step import TrainStep


@dataclass
class Resumption:
    """The state that a start goes on from. saved: the checkpoint on disk. copy: the one in memory, if it is newer."""

    copies: MemoryCopies | None
    saved: Path | None
    copy: Path | None = None

    @property
    def source(self) -> Path | None:
        """The folder that is read; None: the run starts at step 0."""
        return self.copy or self.saved

    def load(self, trainer: TrainStep) -> Path | None:
        """Fill the trainer, and return what was read; None: nothing. Collective.

        A copy in memory that is damaged is left for the checkpoint. Raises CheckpointError, which names an intact older
        checkpoint where that one is damaged.
        """
        if self.copy is not None and self.copies is not None:
            try:
                self.copies.fetch(trainer, self.copy)
                trainer.resume(self.copy)
            except CheckpointError as error:
                if self.saved is None:
                    self.copies.drop()
                    raise CheckpointError(
                        f"{error}\n  the copy in memory is removed, and there is no checkpoint: the same command starts"
                        " from step 0"
                    ) from error
                if trainer.mesh.rank == 0:
                    complain(f"warning: {error}; going on from {self.saved}")
                self.copy = None
        if self.copy is None and self.saved is not None:
            _resume(trainer, self.saved)
        if self.copies is not None:
            self.copies.resumed(None if self.copy is None else trainer.state.step)
        return self.source

    def close(self) -> None:
        """Remove the copies of a run whose last step is saved. Collective."""
        if self.copies is not None:
            self.copies.close()

    def line(self, step: int) -> str:
        """Return the line on a start that goes on."""
        if self.copy is None:
            return f"resumed after step {step} from {self.saved}"
        older = "none" if self.saved is None else self.saved.name
        return f"resumed after step {step} from the copy in memory, {self.copy}; the newest checkpoint on disk: {older}"


FROM_STEP_0 = Resumption(None, None)


def to_resume(
    config: RunConfig, mesh: ParallelMesh, node: str, checkpoints: Path, found: Path | None, data: RunData
) -> Resumption:
    """Return where the run goes on; rank 0 decides it, so that all ranks resume the same.

    node: this rank's host. found: on rank 0 the checkpoint that the settings name, among `checkpoints` or elsewhere.
    Collective. Raises ConfigError on rank 0 where a copy in memory is of other samples.
    """
    saved: Path | None = mesh.broadcast_object(found)
    copies = memory_copies(config, mesh, node, checkpoints)
    copy = None if copies is None else copies.newest(saved)
    if copy is not None and mesh.rank == 0:
        check = ResumeCheck(copy, config)
        check.require_same_run()
        check.require_same_samples()
        check.require_same_data(data)
    return Resumption(copies, saved, copy)


def _resume(trainer: TrainStep, checkpoint: Path) -> None:
    """Resume a checkpoint. Raises CheckpointError, which names an intact older checkpoint if this one is damaged."""
    try:
        trainer.resume(checkpoint)
    except CheckpointError as error:
        mesh = trainer.mesh
        instead = mesh.broadcast_object(intact_instead(checkpoint) if mesh.rank == 0 else None)
        if instead is None:
            raise CheckpointError(
                f"{error}\n  to resume from another checkpoint, set checkpoint.resume to its path"
            ) from error
        raise CheckpointError(
            f"{error}\n  {instead} is intact: remove {checkpoint.name}, and resume from {instead.name} "
            f'(checkpoint.resume = "{instead}")'
        ) from error
