"""Names of files that other programs' folders share: pointers, numbered folders, a config.json. No torch."""

import re
from pathlib import Path

_STEP = re.compile(r"checkpoint-(\d{1,15})", re.ASCII)


def find_config(place: Path) -> Path | None:
    """Return the folder with a config.json: a checkpoint's folder or its parent; None if neither has one."""
    places = (place, place.resolve().parent)
    return next((each for each in places if (each / "config.json").is_file()), None)


def named_by(pointer: Path) -> str | None:
    """Return the name in a pointer file; None if it is missing, unreadable or not the name of a sibling."""
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if name not in ("", "..") and Path(name).name == name else None


def latest_step(folder: Path) -> Path | None:
    """Return the checkpoint-N of the largest N, as Hugging Face's Trainer names its folders; None without one."""
    try:
        folders = [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return None
    steps = {int(match[1]): path for path in folders if (match := _STEP.fullmatch(path.name))}
    return steps[max(steps)] if steps else None
