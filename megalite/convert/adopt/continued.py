"""Where an adopted run writes, and the import that comes first where it goes on from another program's checkpoint."""

from pathlib import Path
from shlex import quote

from megalite.convert.adopt.rules import Reading, text
from megalite.convert.foreign.formats import find_format
from megalite.errors import CheckpointError

FOLDER = "run.folder"


def answer_output(reading: Reading, key: str, value: object) -> None:
    """Answer the key of the folder that a run writes: run.folder, a new one where another program's checkpoints are."""
    theirs = text(value)
    ours = own_folder(theirs)
    if ours == theirs:
        reading.take(key, {FOLDER: ours})
    else:
        reason = "another program's checkpoints are there, so the run has a folder of its own"
        reading.change(key, {FOLDER: ours}, reason)


def answer_resume(reading: Reading, key: str, load: str, output: object) -> None:
    """Answer the key that names the checkpoint with which a run goes on, its optimizer's state included.

    load: the folder or checkpoint. output: value of the key of the folder that the run writes, None without one. A
    checkpoint that is here is to be imported first; one elsewhere is refused, unless it would be the run's own.
    """
    theirs = text(output) if output is not None else f"runs/{Path(load).name or 'adopted'}"
    ours = own_folder(theirs)
    command = f"megalite convert import {quote(load)} {quote(ours)}"
    settings = {"checkpoint.resume": "auto"} if output is not None else {FOLDER: ours}
    if is_foreign(Path(load)):
        reading.account.continues = [command]
        reading.change(key, settings, "resumes from run.folder, after the import in the last line")
    elif load == theirs:
        reason = f"resumes from run.folder; no other program's checkpoint is in {load} here; where one is, adopt there"
        reading.change(key, settings, reason)
    else:
        reading.account.continues = [command]
        remedy = f"run {command} where the checkpoint is, before the run, and add --partial"
        reading.refuse(key, "is no checkpoint on this machine, and the run goes on from it", remedy)


def begins_anew(reading: Reading, load: object, output: object, no_optimizer: str) -> bool:
    """Return whether a run takes a checkpoint's weights alone, by finetune or by the key `no_optimizer`."""
    own = load == output and not is_foreign(Path(str(load)))
    return reading.is_on("finetune") or (reading.is_on(no_optimizer) and not own)


def own_folder(theirs: str) -> str:
    """Return a run folder for another program's output folder: the same, unless it has checkpoints of theirs."""
    path = Path(theirs)
    while is_foreign(path):
        path = path / "megalite" if path.name in ("", "..") else path.with_name(f"{path.name}-megalite")
    return theirs if path == Path(theirs) else str(path)


def is_foreign(folder: Path) -> bool:
    """Return whether a folder has another program's checkpoints, also those that no loader can open."""
    try:
        return find_format(folder) is not None
    except CheckpointError:
        return True
    except (OSError, ValueError):  # a name that no file can have
        return False
