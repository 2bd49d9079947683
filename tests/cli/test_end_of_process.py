"""The end of a command's process, for which a restart waits."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 1000))
from megalite.cli import main
main(["--version"])
"""


def test_no_collection_looks_at_the_objects_of_a_command_that_has_ended():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "frozen True"


INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from megalite.cli import main
sys.exit(main(["config", "presets"]))
"""


@pytest.mark.parametrize("module", ["megalite.cli.arguments", "pydantic", "megalite.cli.config"])
def test_ctrl_c_during_the_imports_ends_a_command_in_silence(module: str) -> None:
    program = INTERRUPTED.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
