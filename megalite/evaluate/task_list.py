"""Loads tasks of lm_eval: of its registry by name, or from YAML files. No torch before."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task


def load_tasks(names: Sequence[str], *, allow_code: bool = False) -> "list[Task | Group]":
    """Return the tasks and groups of these names; a .yaml file or a folder of them is local.

    A local task's data files stand relative to its folder. allow_code: whether tasks may run generated programs.
    Raises DataError for a task that cannot be loaded, ConfigError for one that runs programs without `allow_code`.
    """
    from lm_eval.tasks import TaskManager

    paths = {name: Path(name).expanduser().absolute() for name in names if is_local(name)}
    files = {name: _yaml_files(path) for name, path in paths.items()}
    groups = {file: group for own in files.values() for file in own if (group := _group(file))}
    folders = {path for path in paths.values() if path.is_dir()} | {file.parent for file in groups}
    # lm_eval reads thousands of files to know the names of its own tasks, which a group may have too.
    has_names = len(paths) < len(names) or bool(groups)
    manager = TaskManager(include_path=sorted(folders), include_defaults=has_names)
    tasks: dict[str, Task | Group] = {}
    members: set[str] = set()
    for name in names:
        for spec in files.get(name, [name]):
            with contextlib.chdir(spec.parent if isinstance(spec, Path) else "."):
                # lm_eval loads tasks from files, but a group only by its name.
                loaded = _load(manager, groups.get(spec, spec) if isinstance(spec, Path) else spec)
            tasks |= loaded["tasks"] | loaded.get("groups", {})
            members.update(*loaded.get("group_map", {}).values())
            unsafe = [task for task, value in loaded["tasks"].items() if getattr(value, "UNSAFE_CODE", False)]
            if unsafe and not allow_code:
                problem = Problem(
                    "--tasks",
                    f"{unsafe[0]} runs the generated programs on this machine",
                    "add --allow-code to permit that (best in a container)",
                )
                raise ConfigError([problem], "the request")
    return [task for name, task in tasks.items() if name not in members]


def is_local(name: str) -> bool:
    """Return whether a task is a path: of a .yaml file, or of a folder, which is written with a slash."""
    return name.endswith(".yaml") or "/" in name


def _load(manager: Any, spec: str | Path) -> Any:
    """Return what lm_eval makes of a name or file. Raises DataError: lm_eval's many errors have no common type."""
    try:
        return manager.load([str(spec)])
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = (
            "correct the file or its data files"
            if isinstance(spec, Path)
            else "name one of `lm_eval ls tasks`, whose data come from the Hugging Face Hub, or a .yaml file of yours"
        )
        raise DataError(f"--tasks: lm_eval cannot load {spec} ({reason}); {remedy}") from error


def _yaml_files(path: Path) -> list[Path]:
    """Return the tasks of a file or folder; files that others include have neither key. Raises DataError."""
    if not path.is_dir():
        return [path]
    files = [
        file for file in sorted(path.glob("*.yaml")) if re.search(r"(?m)^(task|group):", file.read_text())
    ]
    if not files:
        raise DataError(f"--tasks: {path} has no .yaml file of a task; name a folder or file that has one")
    return files


def _group(file: Path) -> str | None:
    """Return the name of the group that a file defines; None for another file."""
    match = re.search(r"(?m)^group: *['\"]?([^'\"\s]+)", file.read_text())
    return match and match[1]
