"""The number of ranks that a launcher started, in words: the variable that says so, and how to start another number."""

from collections.abc import Sequence

from megalite.launcher.rank.detect import RankInfo

# Launcher -> how it starts {ranks} ranks.
_STARTS = {
    "torchrun": "torchrun with --nnodes * --nproc-per-node = {ranks}",
    "deepspeed": "{ranks} slots in the hostfile, or deepspeed --num_gpus {ranks} on one machine",
    "openmpi": "mpirun -n {ranks}",
    "mpich": "mpirun -n {ranks}",
    "slurm": "srun --ntasks={ranks}",
    "the environment": "{ranks} processes with WORLD_SIZE={ranks}",
}


def ranks_started(world_size: int, info: RankInfo | None) -> str:
    """Return the number of ranks with its source: "4 ranks that torchrun started (WORLD_SIZE = 4)".

    info: a rank of the launcher; None: the number has no launcher.
    """
    count = f"{world_size} rank{'s' * (world_size != 1)} that"
    if info is None or not info.size_variable:
        return f"{count} {'was' if world_size == 1 else 'were'} started"
    source = "the environment names" if info.launcher == "the environment" else f"{info.launcher} started"
    return f"{count} {source} ({info.size_variable} = {world_size})"


def how_to_start(counts: Sequence[int], info: RankInfo | None) -> str:
    """Return the remedy for a wrong number of ranks: how their launcher starts one of `counts`."""
    remedy = f"start {' or '.join(map(str, counts))} rank{'s' * (list(counts) != [1])}"
    if info is None or info.launcher not in _STARTS:
        return remedy
    return (
        f"{remedy}{':' if len(counts) == 1 else ', as with'} {_STARTS[info.launcher].format(ranks=counts[0])}"
    )
