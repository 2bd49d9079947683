"""One SLURM array script for all runs of a study, made of `launch/slurm.sbatch`: a task trains one run."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.errors import ConfigError, Problem
from megalite.studies.study_runs import StudyRun

_EDIT = "set -euo pipefail\n"


def array_script(template: str, run_file: Path, runs: Sequence[StudyRun], jobs: int | None) -> str:
    """Return the script. template: the text of launch/slurm.sbatch. jobs: how many tasks run at once; None: all.

    Raises ConfigError where the runs need different numbers of ranks.
    """
    ranks = {run.config.layout.world_size for run in runs}
    if len(ranks) > 1:
        message = (
            f"the runs need {', '.join(map(str, sorted(ranks)))} ranks, and the tasks of an array are alike"
        )
        raise ConfigError([Problem("--slurm", message, "sweep the layouts one by one")])
    at_once = "" if jobs is None else f"%{jobs}"
    header, _, body = template.partition(_EDIT)
    usage = "# Train a sweep as a SLURM array: sbatch FILE. Written by megalite sweep, from launch/slurm.sbatch.\n"
    directives = [line for line in header.splitlines() if line.startswith(("#SBATCH", "##SBATCH"))]
    header = "\n".join(["#!/usr/bin/env bash", usage + "#", *directives]) + "\n"
    header = _directive(header, "ntasks-per-node", str(ranks.pop()))
    header = _directive(header, "output", "%x-%A_%a.log")
    header += f"#SBATCH --array=0-{len(runs) - 1}{at_once}\n"
    cases = [f"    {number}) set -- {shlex.join(run.flags)} ;;" for number, run in enumerate(runs)]
    choice = "case $SLURM_ARRAY_TASK_ID in\n" + "\n".join(cases) + "\n    *) exit 2 ;;\nesac\n"
    # The template takes both from the environment.
    ours = f"RUN={shlex.quote(str(run_file))}\nPYTHON=${{PYTHON:-{shlex.quote(sys.executable)}}}\n"
    return header + _EDIT + choice + ours + body


def _directive(header: str, name: str, value: str) -> str:
    """Return the header with another value of a directive."""
    return re.sub(rf"^#SBATCH --{name}=\S+", f"#SBATCH --{name}={value}", header, flags=re.MULTILINE)
