"""Every file of the package with the first sentence of its docstring.

python -m docs.rooms [PATH]     # PATH: a part of the package, such as data/chat
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megalite"


def rooms(part: str = "") -> Iterator[str]:
    """Yield a line for each package and each file below `part`, in the order of the folders."""
    files = sorted((PACKAGE / part).rglob("*.py"), key=lambda file: (file.parent, file.name))
    packages = {file.parent for file in files if file.name == "__init__.py"}
    for file in files:
        inner = file.relative_to(PACKAGE)
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        first = " ".join(docstring.split("\n\n")[0].split())
        if file.name == "__init__.py":
            yield f"\n{inner.parent.as_posix()}/  {first}"
        elif file.parent not in packages:  # a folder that setup.py reads
            yield f"\n{inner.as_posix()}  {first}"
        else:
            yield f"  {file.name:<26} {first}"


if __name__ == "__main__":
    print("\n".join(rooms(*sys.argv[1:2])))
