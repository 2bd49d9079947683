"""Who started this process, read from the environment, and what torch and DeepSpeed read from it in turn.

The only reader and writer of os.environ; its functions take the variables as an argument, those by default.
"""

import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from megalite.launcher.detect import RankInfo
from megalite.launcher.process import available_cores, keep_freed_memory

# A device node of each kind of accelerator that DeepSpeed would look for by importing its libraries.
_ACCELERATORS = (
    "nvidia[0-9]*",
    "nvidiactl",
    "dxg",
    "kfd",
    "dri/render*",
    "davinci*",
    "accel*",
    "habanalabs*",
)


def export_rank(info: RankInfo, environ: MutableMapping[str, str] | None = None) -> None:
    """Tell torch and DeepSpeed in this process which rank it is."""
    environ = os.environ if environ is None else environ
    environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        LOCAL_SIZE=str(info.local_world_size),  # spares DeepSpeed a call of numactl to count devices
        MASTER_ADDR=info.master_addr,
        MASTER_PORT=str(info.master_port),
    )


@contextmanager
def exported_rank(info: RankInfo) -> Iterator[None]:
    """`export_rank` for as long as it is entered: in a process that goes on as no rank."""
    before = dict(os.environ)
    export_rank(info)
    told = [name for name, value in os.environ.items() if before.get(name) != value]
    try:
        yield
    finally:
        for name in told:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in told if name in before})


def prepare_process(
    threads: int | Literal["auto"] = "auto",
    *,
    local_ranks: int = 1,
    info: RankInfo | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> int:
    """Ready this process, and those forked from it, for torch; return the threads a rank computes with.

    Call it before anything imports torch, which reads these variables once. `info` is what `rank_info`
    found; without it this process starts `local_ranks` ranks of its own. What the user has set stays, but
    for the thread counts where `threads` is a number.
    """
    environ = os.environ if environ is None else environ
    local_ranks = info.local_world_size if info else local_ranks
    threads = threads_per_rank(local_ranks, info, environ) if threads == "auto" else threads
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environ[name] = str(threads)
    if "OMP_WAIT_POLICY" not in environ:
        # Threads that wait for one another spin for milliseconds else, and ten times as long as they compute where the
        # kernel or another job has them share a core.
        environ.setdefault("GOMP_SPINCOUNT", "1000")
    keep_freed_memory()

    loopback = any(name == "lo" for _, name in socket.if_nameindex())
    if loopback and (info is None or info.on_one_node):
        # A hostname that does not resolve stops gloo, and ranks of one machine are nobody else's business.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if local_ranks > 1:
        environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    if not any(node for pattern in _ACCELERATORS for node in Path("/dev").glob(pattern)):
        environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # or DeepSpeed searches for every kind, and warns in every rank
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environ.setdefault("TORCH_EXTENSIONS_DIR", str(_user_cache(environ) / "megalite" / "torch_extensions"))
    return threads


def without_apex(environ: Mapping[str, str] | None = None) -> bool:
    """Whether NVIDIA Apex's kernels are to be left alone, however good: MEGALITE_NO_APEX=1."""
    return (os.environ if environ is None else environ).get("MEGALITE_NO_APEX", "") == "1"


def trust_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where findings about operators on cards are kept: MEGALITE_TRUST_FOLDER, or in the user's cache."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("MEGALITE_TRUST_FOLDER", "")
    return Path(chosen) if chosen else _user_cache(environ) / "megalite" / "trust"


def threads_per_rank(
    local_ranks: int, info: RankInfo | None = None, environ: Mapping[str, str] | None = None
) -> int:
    """OMP_NUM_THREADS if somebody chose it, else this node's cores shared among its ranks, at least 1."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 for lack of anything better; whoever means it sets training.threads.
    if (
        chosen.isdecimal()
        and int(chosen) > 0
        and not (info and info.launcher == "torchrun" and chosen == "1")
    ):
        return int(chosen)
    cores = available_cores()
    if info and info.launcher in ("slurm", "openmpi", "mpich"):
        # These may have bound each rank to cores of its own, or all ranks of the node to the same ones.
        on_node = environ.get("SLURM_CPUS_ON_NODE", "")
        shared = int(on_node) if on_node.isdecimal() else os.cpu_count() or 1
        return max(1, min(cores, shared // local_ranks))
    return max(1, cores // local_ranks)


def _user_cache(environ: Mapping[str, str]) -> Path:
    chosen = environ.get("XDG_CACHE_HOME", "")
    return Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".cache"
