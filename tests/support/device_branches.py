"""Every function of megalite that asks what kind of device it has, and the test that runs its accelerator's branch.

tests/standin/test_device_branches.py finds these functions in the source and holds that they are listed here.
"""

# Called by a run on the stand-in accelerator (tests/standin/test_whole_life.py).
ON_THE_STANDIN: set[str] = set()

# Function -> the test that runs what it does for an accelerator, or for CUDA alone.
ELSEWHERE: dict[str, str] = {}
