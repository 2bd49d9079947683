"""The host of each rank of a job, as its launcher tells it to every rank."""

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.slurm import node_names, tasks_per_node

_WORLD = "--world_info="  # of deepspeed.launcher.launch: base64 of the JSON of host -> slots


def hosts_of_ranks(info: RankInfo, environ: Mapping[str, str], launcher: Sequence[str]) -> tuple[str, ...]:
    """Return the host of each rank of a job, as SLURM or deepspeed tells it to each of them; empty without these.

    launcher: the command line of the process that started this rank.
    """
    slots: Mapping[str, Sequence[int]] = {}
    if info.launcher == "slurm" and environ.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        names = node_names(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
        slots = {
            name: range(count)
            for name, count in zip(names, tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"]), strict=False)
        }
    elif info.launcher == "deepspeed":
        world = [word.removeprefix(_WORLD) for word in launcher if word.startswith(_WORLD)]
        with suppress(ValueError):
            slots = json.loads(base64.urlsafe_b64decode(world[0])) if world else {}
    ranks = tuple(name for name, numbers in slots.items() for _ in numbers)
    return ranks if len(ranks) == info.world_size else ()
