"""Weights & Biases: a run of the service, or a folder for `wandb sync` with WANDB_MODE=offline."""

import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megalite.launcher.rank.environment import variables
from megalite.monitor.metrics import curves
from megalite.monitor.sink import ReportedRun, Sink

# Without a network the start, and the end of a run that came to its end, wait so long. Its summary is ours.
_LIMITS: Mapping[str, Any] = {"init_timeout": 30.0, "finish_timeout": 30.0, "quiet": True}
_BLOCK_BYTES, _HEADER_BYTES, _LAST_OF_A_RECORD = 32768, 7, (b"\x01", b"\x04")


class WandbRun(Sink):
    """Reports to one run of the service, whose id stands in the run folder; WANDB_* variables fill in what is unset."""

    module = package = "wandb"

    def __init__(self, run: ReportedRun):
        import wandb

        environ, monitor = variables(), run.monitor
        stored = run.read_id("wandb")
        folder = Path(environ.get("WANDB_DIR") or run.folder)
        limits = {name: value for name, value in _LIMITS.items() if f"WANDB_{name.upper()}" not in environ}
        start = partial(
            wandb.init,
            project=monitor.project,
            entity=monitor.entity,
            group=monitor.group,
            name=monitor.run_name or environ.get("WANDB_NAME") or run.name,
            id=stored or environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
            resume="allow",
            dir=folder,
            config=run.config.model_dump(mode="json"),
            # The console's text would have every drawing of the live view.
            settings=wandb.Settings(console="off", finish_timeout_raises=True, **limits),
        )
        earlier = _last_step_offline(folder, stored) if stored else -1
        try:
            if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
                raise RuntimeError("there is no API key; run wandb login, or set WANDB_MODE=offline")
            self._run = start()
        except wandb.Error as error:
            self._run = start(mode="offline")
            self.note = f"wandb writes to {self.place} alone, which wandb sync sends later: {error}"
        # The service keeps the first record of a step, and warns of a second one. Offline, the client does not know it.
        self.reported_step = max(earlier, self._run.step - 1) if stored else run.after_step
        self._skipped_to = self.reported_step if stored else -1
        run.write_id("wandb", self._run.id)

    @property
    def place(self) -> str | Path | None:
        return Path(self._run.dir).parent if self._run.offline else self._run.url

    def append(self, record: Mapping[str, Any]) -> None:
        if record["step"] > self._skipped_to:
            self._run.log(curves(record), step=record["step"], commit=True)

    def checkpoint(self, path: Path) -> None:
        """Upload a checkpoint in the background, from a copy."""
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="model")
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact, aliases=["latest", path.name])

    def close(self, exit_code: int) -> None:
        folder = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError as error:
            raise TimeoutError(f"the last ones have not arrived; wandb sync {folder} sends them") from error


def _last_step_offline(folder: Path, run_id: str) -> int:
    """Return the last step in the files that earlier starts of a run wrote offline; -1: there is none."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    last = -1
    for file in (folder / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"):
        for content in _contents(file.read_bytes()):
            record = Record()
            try:
                record.ParseFromString(content)
            except DecodeError:
                continue
            steps = [
                item.value_json for item in record.history.item if "_step" in (item.key, *item.nested_key)
            ]
            last = max([last, *map(int, steps)])
    return last


def _contents(file: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, behind a header of wandb's; one that is cut off is left out.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    position, parts = _HEADER_BYTES, b""
    while position < len(file):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            position += left
            continue
        length, kind = (
            int.from_bytes(file[position + 4 : position + 6], "little"),
            file[position + 6 : position + 7],
        )
        position += _HEADER_BYTES
        parts += file[position : position + length]
        position += length
        if kind in _LAST_OF_A_RECORD:
            yield parts
            parts = b""
