"""The end of a launcher that does not end by itself, in a process of its own: `supervise` ends all children."""

import subprocess
import sys

from tests.support.waiting import PATIENCE

# A launcher whose only rank joins, leaves, and then goes on for minutes, as MPICH's mpirun may.
SCRIPT = """
import sys
from megalite.launcher.hosts import supervise as module
from megalite.launcher.hosts.backends import Command, Start
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.rank_states import CoordinatedJob

RANK = '''
import sys, time
from megalite.launcher.control.connection import DEFAULT_LIMITS
from megalite.launcher.control.member import Member
from megalite.launcher.control.messages import Hello
member = Member.join(lambda: ("127.0.0.1", int(sys.argv[1]), ""), Hello(0, 1, "n0", 1), DEFAULT_LIMITS)
member.leave(int(sys.argv[2]))
time.sleep(600)
'''
module._LEFT_SECONDS = module._END_SECONDS = 0.2
listener = module.listen([])
coordinator = Coordinator(listener, CoordinatedJob(1), say=print)
command = Command((sys.executable, "-c", RANK, str(coordinator.address[1]), sys.argv[1]))
result = module.supervise(Start((command,)), coordinator, backend="mpirun", environ={}, say=print)
print(result.exit_code, result.text)
"""


def test_a_launcher_that_outlives_its_ranks_is_ended_with_their_code():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "75"], capture_output=True, text=True, timeout=PATIENCE
    )
    said = "mpirun has not ended 0.2 s after its ranks, and is ended"
    assert run.stdout.splitlines() == [said, "75 "], run.stdout + run.stderr
