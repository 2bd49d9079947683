"""Write a checkpoint at once, as a run does in parts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.manifest import Base
from megalite.checkpoint.save import RunRecord, draft_checkpoint, write_draft
from megalite.model.replica import Replica
from megalite.topology.state import OptimizerState, StateShard


class NoOptimizer:
    """The state of a model without an optimizer: weights only."""

    def weights(self) -> None:
        return None

    def shards(self) -> Iterator[StateShard]:
        yield from ()

    def scalars(self) -> dict[str, Any]:
        return {}

    def load(self, scalars: Mapping[str, Any]) -> None:
        pass


def save_checkpoint(
    folder: Path,
    replica: Replica,
    optimizer: OptimizerState,
    *,
    trainer_state: Mapping[str, int],
    config: Mapping[str, Any],
    base: Base | None = None,
) -> Path:
    """Write `folder`/step-NNNNNN and make `latest` name it; collective over the world, which shares it."""
    draft = draft_checkpoint(folder, replica, optimizer, RunRecord(trainer_state, config, base))
    write_draft(draft, replica.mesh)
    return draft.published
