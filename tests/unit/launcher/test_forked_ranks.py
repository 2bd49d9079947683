"""The ranks of a job are told from programs that it starts, wherever the checkout lies and whatever it is called."""

import subprocess
import sys

from megalite.launcher.process import descendants, forked_ranks

JOB = """
import os, subprocess, sys
program = subprocess.Popen([sys.executable, "-c", "input()", "megalite"], stdin=subprocess.PIPE)
ranks = []
for _ in range(2):
    rank = os.fork()
    if rank == 0:
        sys.stdin.read()
        os._exit(0)
    ranks.append(rank)
print(program.pid, *ranks, flush=True)
sys.stdin.read()
program.communicate(b"\\n")
"""


def test_programs_that_a_job_starts_are_no_ranks() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", JOB, "megalite"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        program, *ranks = map(int, job.stdout.readline().split())
        assert sorted(descendants(job.pid)) == sorted([program, *ranks])
        assert forked_ranks(job.pid) == ranks
        job.communicate()
