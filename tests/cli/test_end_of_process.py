"""The end of a command's process, for which a restart waits."""

import subprocess
import sys

PROGRAM = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 1000))
from megalite.cli import main
main(["--version"])
"""


def test_no_collection_looks_at_the_objects_of_a_command_that_has_ended():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "frozen True"
