"""DeepSpeed files of other projects, rewritten from their facts, and the table of what each one gives."""

import json
import tomllib
from pathlib import Path
from typing import Any

from megalite.config.load import LoadedRun
from tests.unit.config.runs import REMOVED, load

FOLDER = Path(__file__).parent / "deepspeed_files"
TABLE = tomllib.loads((FOLDER / "expected.toml").read_text(encoding="utf-8"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")


def contents(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def load_beside_a_run(folder: Path, name: str, ranks: int | None = None) -> LoadedRun:
    """Load a run with the file, which sets the batch where the file does not; ranks: None takes the table's."""
    given = contents(name)
    changes: dict[str, Any] = {}
    if any(isinstance(given.get(key), int) for key in _BATCH):
        changes = {"training.micro_batch_size": REMOVED, "training.global_batch_size": REMOVED}
    return load(folder, changes, ds_json=given, world_size=ranks or TABLE.get(name, {}).get("ranks", 1))


def decided(loaded: LoadedRun) -> dict[str, Any]:
    """The settings that the file decides, and those that have DeepSpeed's default because of it."""
    found = {}
    for key, origin in loaded.origins.items():
        section, name = key.split(".", 1)
        if section != "deepspeed" and ("ds.json" in origin or origin.startswith("DeepSpeed")):
            value = getattr(getattr(loaded.config, section), name)
            found[key] = list(value) if isinstance(value, tuple) else value
    return found | {"zero_optimization.stage": loaded.config.zero_stage}
