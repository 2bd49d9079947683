"""The source "stdlib": the modules of Python's own library, without its tests and generated tables."""

import os
import sysconfig
from pathlib import Path

from megalite.errors import DataError

STANDARD_LIBRARY = "stdlib"

# Installed packages, tests, tables of code points and help texts, tools that newer Pythons have no more, and tkinter,
# hundreds of wrappers that all make the same call.
_LEFT_OUT_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "distutils",
    "idlelib",
    "tkinter",
    "turtledemo",
    "__phello__",
}
_LEFT_OUT_FILES = ("_sysconfigdata", "entities.py")


def library_modules(pattern: str, key: str) -> list[Path]:
    """Return the modules of the library in a fixed order, those whose path in it matches `pattern`.

    Raises DataError, with the setting `key`, if there are none.
    """
    root = Path(sysconfig.get_path("stdlib")).resolve()
    paths = []
    for folder, below, names in os.walk(root):
        # Changed in place, so that os.walk does not enter installed packages, which are often far larger.
        below[:] = [name for name in below if name not in _LEFT_OUT_FOLDERS]
        modules = (name for name in names if name.endswith(".py") and not name.startswith(_LEFT_OUT_FILES))
        paths += [
            Path(folder, name) for name in modules if Path(folder, name).relative_to(root).match(pattern)
        ]
    if not paths:
        raise DataError(
            f"{key}: no module of this Python's library in {root} matches {pattern!r}; set another data.pattern, "
            f"or name a folder with text instead of {STANDARD_LIBRARY}"
        )
    return sorted(paths, key=Path.as_posix)
