"""Weights & Biases: a run of the service, or a folder for `wandb sync` with WANDB_MODE=offline."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.launcher.rank.environment import variables
from megalite.monitor.metrics import curves
from megalite.monitor.sink import ReportedRun, Sink


class WandbRun(Sink):
    """Reports to one run of the service, whose id stands in the run folder; WANDB_* variables fill in what is unset."""

    module = package = "wandb"

    def __init__(self, run: ReportedRun):
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("there is no API key; run wandb login, or set WANDB_MODE=offline")
        environ, monitor = variables(), run.monitor
        stored = run.read_id("wandb")
        # The service keeps the first record of a step, and warns of a second one.
        self._recorded_step = run.recorded_step if stored else -1
        self._run = wandb.init(
            project=monitor.project,
            entity=monitor.entity,
            group=monitor.group,
            name=monitor.run_name or environ.get("WANDB_NAME") or run.name,
            id=stored or environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
            resume="allow",
            dir=environ.get("WANDB_DIR") or run.folder,
            config=run.config.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),  # it would upload every drawing of the live view
        )
        run.write_id("wandb", self._run.id)

    @property
    def place(self) -> str | Path | None:
        return Path(self._run.dir).parent if self._run.offline else self._run.url

    def append(self, record: Mapping[str, Any]) -> None:
        if record["step"] > self._recorded_step:
            self._run.log(curves(record), step=record["step"], commit=True)

    def checkpoint(self, path: Path) -> None:
        """Upload a checkpoint in the background, from a copy."""
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="model")
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact, aliases=["latest", path.name])

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
