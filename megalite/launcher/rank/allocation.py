"""The end of the SLURM allocation that this process runs in, asked once."""

import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

_SQUEUE_SECONDS = 10.0
_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")


@dataclass(frozen=True)
class TimeLeft:
    """seconds: until the end of the allocation; None: there is no limit, or it is unknown and `note` says why."""

    seconds: float | None
    note: str = ""


def time_left(environ: Mapping[str, str]) -> TimeLeft:
    """Return the time that is left of the allocation: from SLURM_JOB_END_TIME, else from squeue within 10 seconds.

    environ: SLURM's variables; without SLURM_JOB_ID there is no allocation.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return TimeLeft(None)
    end = environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal() and int(end) > 0:
        return TimeLeft(int(end) - time.time())
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%L"],
            capture_output=True,
            text=True,
            timeout=_SQUEUE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TimeLeft(None, f"squeue has not answered within {_SQUEUE_SECONDS:g} s")
    except OSError as error:
        return TimeLeft(None, f"squeue cannot be run: {error.strerror}")
    answer = asked.stdout.strip()
    if asked.returncode:
        return TimeLeft(None, f"squeue failed: {asked.stderr.strip() or asked.returncode}")
    if answer == "UNLIMITED":
        return TimeLeft(None)
    match = _LEFT.fullmatch(answer)
    if match is None:
        return TimeLeft(None, f"squeue answered {answer!r}")
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return TimeLeft(float(((days * 24 + hours) * 60 + minutes) * 60 + seconds))
