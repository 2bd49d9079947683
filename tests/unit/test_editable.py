"""An editable install is found from the folder that holds the checkout, too."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
USE = "import site, sys; site.addsitedir(sys.argv[1]); from megalite import __version__; print(__version__)"


def test_the_checkouts_name_does_not_hide_the_package_in_it(tmp_path: Path) -> None:
    checkout, installed = tmp_path / "megalite", tmp_path / "site-packages"
    (checkout / "megalite" / "ops").mkdir(parents=True)
    for name in ("setup.py", "build_backend.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, checkout)
    for name in ("__init__.py", "version.py", "ops/__init__.py"):
        shutil.copy(ROOT / "megalite" / name, checkout / "megalite" / name)
    shutil.copytree(ROOT / "megalite" / "csrc", checkout / "megalite" / "csrc")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def python(code: str, folder: Path, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        environ = alone | {"MEGALITE_OPERATORS": "0"}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # As pip does.
    python("import build_backend; build_backend.build_editable('..')", checkout)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    assert python(USE, tmp_path, str(installed)).strip()
