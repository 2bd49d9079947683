"""Records each start of a run in starts.jsonl: versions, machine, operators, and the origin of each setting."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.launcher.machine_report import packages, system
from megalite.launcher.rank.detect import RankInfo
from megalite.train.run_folder import RunFolder
from megalite.train.step.train_step import TrainStep
from megalite.version import __version__


def record_start(
    folder: RunFolder,
    trainer: TrainStep,
    info: RankInfo,
    origins: Mapping[str, str],
    device: str,
    source: Path | None = None,
) -> None:
    """Append the start of rank 0 to the file. OSError.

    origins: of each `section.key` that is no default. source: the checkpoint or copy that the run goes on from.
    """
    record: dict[str, Any] = {
        "time": time.time(),
        "step": trainer.state.step,
        "resumed_from": None if source is None else str(source),
        "megalite": __version__,
        "packages": {package.name: package.found for package in packages() if package.found},
        "machine": system(),
        "host": info.node,
        "ranks": info.world_size,
        "ranks_a_host": info.local_world_size,
        "device": device,
        "plain_torch": trainer.kernels.name == "reference",
        "operators": str(trainer.kernels),
        "precision": trainer.config.training.precision,
        "origins": dict(origins),
    }
    with folder.starts.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
