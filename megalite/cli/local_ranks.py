"""Runs the work of a command on this machine's ranks: one process, or one for each rank of a layout."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megalite.cli.inference_memory import InferenceMemory
from megalite.errors import RankFailure
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.environment import grow_segments, prepare_process
from megalite.topology.axes import Layout

if TYPE_CHECKING:
    from megalite.monitor.memory import ExhaustedCard
    from megalite.parallel.mesh import ParallelMesh

R = TypeVar("R")


def on_local_ranks(
    layout: Layout,
    work: "Callable[[R, ParallelMesh], int]",
    request: R,
    *,
    name: str,
    preload: Sequence[str],
    memory: InferenceMemory,
) -> int:
    """Call `work(request, mesh)`, which returns an exit code, on every rank of the layout; return that of the job.

    torch is imported here, so a command checks its arguments before. name: of the command, for its scratch folder.
    preload: modules to import before the ranks are forked. memory: what the work keeps on an accelerator.
    Raises RankFailure if a rank fails, and keeps the report that it names; a layout of one rank raises the error of
    `work` itself, and MemoryExhausted if its accelerator has no memory left.
    """
    if layout.world_size == 1:
        from megalite.parallel.device import local_device
        from megalite.parallel.mesh import ParallelMesh

        grow_segments()
        return _with_memory(work, request, ParallelMesh.single(local_device(0, 1)), memory)
    threads = prepare_process("auto", local_ranks=layout.world_size, info=None)
    from megalite.launcher.local import LocalStart, run_local_ranks

    scratch = Path(tempfile.mkdtemp(prefix=f"megalite-{name}-"))
    arguments = (layout, work, request, threads, memory)
    has_report = False
    try:
        return run_local_ranks(
            _on_rank, layout, scratch, arguments=arguments, start=LocalStart(["torch", *preload])
        )
    except RankFailure as failure:
        has_report = str(scratch) in str(failure)
        raise
    finally:
        if not has_report:
            shutil.rmtree(scratch)


def _on_rank(
    info: RankInfo,
    layout: Layout,
    work: "Callable[[R, ParallelMesh], int]",
    request: R,
    threads: int,
    memory: InferenceMemory,
) -> int:
    import torch

    from megalite.parallel.device import local_device
    from megalite.parallel.mesh import ParallelMesh, connect, disconnect

    torch.set_num_threads(threads)
    device = local_device(info.local_rank, info.local_world_size)
    connect(info.rank, info.world_size, device=device, rendezvous=info.rendezvous)
    code = _with_memory(work, request, ParallelMesh.over_world(layout, device), memory)
    disconnect()
    return code


def _with_memory(
    work: "Callable[[R, ParallelMesh], int]", request: R, mesh: "ParallelMesh", memory: InferenceMemory
) -> int:
    """Do the work of one rank. Raises MemoryExhausted in place of an accelerator's own error."""
    from megalite.monitor.memory import exhausted_memory_explained

    def explain(card: "ExhaustedCard | None") -> list[str]:
        return memory.lines(mesh.device) if card is None or card.full else []

    with exhausted_memory_explained(mesh.device, explain):
        return work(request, mesh)
