"""The environment variables that we set for torch and DeepSpeed, and the ones that users set for us.

Only this module and detect.py touch os.environ; their functions also take the variables as an argument.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from megalite.errors import LaunchError
from megalite.launcher.process import available_cores, keep_freed_memory
from megalite.launcher.rank.address import GLOO, interface_variables, route_to_master
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.mpi import master_over_mpi
from megalite.launcher.rank.placement import bind_cores

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variables in which users configure torch's allocator of an accelerator."""
SEGMENTS_STAY = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
"""The variable with which NCCL registers torch's segments, which must then stay as they are."""
# The device files of all accelerators that DeepSpeed would otherwise look for by importing their libraries.
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
    """Set the variables from which torch and DeepSpeed read the rank of this process."""
    environ = os.environ if environ is None else environ
    environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        LOCAL_SIZE=str(info.local_world_size),  # otherwise DeepSpeed runs numactl to count devices
        MASTER_ADDR=info.master_addr,
        MASTER_PORT=str(info.master_port),
    )


@contextmanager
def exported_rank(info: RankInfo) -> Iterator[None]:
    """Set the variables of `export_rank` inside of the `with` block, and restore the old ones after it."""
    before = dict(os.environ)
    export_rank(info)
    changed = [name for name, value in os.environ.items() if before.get(name) != value]
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in changed if name in before})


def prepare_process(
    threads: int | Literal["auto"] = "auto",
    *,
    local_ranks: int = 1,
    info: RankInfo | None = None,
    interface: str = "auto",
    environ: MutableMapping[str, str] | None = None,
) -> int:
    """Set the variables of torch for this process and its forks; return the number of threads per rank.

    Call it before the first import of torch, which reads them once. info: the result of `rank_info`; None: this process
    starts `local_ranks` ranks. interface: the setting launch.interface. Variables set by the user stay, except the
    thread counts if `threads` is a number. Raises LaunchError if ranks on several hosts could not reach each other.
    """
    environ = os.environ if environ is None else environ
    local_ranks = info.local_world_size if info else local_ranks
    threads = threads_per_rank(local_ranks, info, environ) if threads == "auto" else threads
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environ[name] = str(threads)
    if "OMP_WAIT_POLICY" not in environ:
        # By default waiting threads spin for milliseconds, which slows down threads that share their core tenfold.
        environ.setdefault("GOMP_SPINCOUNT", "1000")
    keep_freed_memory()
    grow_segments(environ)

    if info is not None and not info.on_one_node:
        environ.update(interface_variables(route_to_master(info, environ, interface), environ))
    elif any(name == "lo" for _, name in socket.if_nameindex()):
        # gloo fails if the host name does not resolve, and local ranks should not listen on the network.
        environ.setdefault(GLOO, "lo")
    if local_ranks > 1:
        environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    if not any(node for pattern in _ACCELERATORS for node in Path("/dev").glob(pattern)):
        # Otherwise DeepSpeed tries to import each accelerator's library, and warns on every rank.
        environ.setdefault("DS_ACCELERATOR", "cpu")
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:  # its name for NCCL
            # torch's flight recorder keeps the last 2000 collectives, whose small blocks split the freed memory of
            # activations: a rank grows until the record is full. Only NCCL's watchdog reads the record.
            environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        environ.setdefault(
            "KINETO_LOG_LEVEL", "6"
        )  # torch.profiler says twice that it works; its errors are ours
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environ.setdefault("TORCH_EXTENSIONS_DIR", str(_user_cache(environ) / "megalite" / "torch_extensions"))
    return threads


def grow_segments(environ: MutableMapping[str, str] | None = None, devices: Path = Path("/dev")) -> None:
    """Let torch grow the segments of CUDA memory that it has reserved, instead of reserving others beside them.

    Sequences of changing lengths then leave fewer unused pieces. Nothing changes where the user configures torch's
    allocator, or registers its segments with NCCL, which needs segments that stay as they are.
    """
    environ = os.environ if environ is None else environ
    configured = any(name in environ for name in (*ALLOCATOR_VARIABLES, SEGMENTS_STAY))
    if any(devices.glob("nvidia[0-9]*")) and not configured:
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def bind_rank(info: RankInfo, bind: bool | Literal["auto"]) -> tuple[int, ...]:
    """Bind this process to its rank's cores, see `bind_cores`; call it before the first computation."""
    return bind_cores(info, os.environ, bind)


def variables() -> dict[str, str]:
    """Return a copy of this process's environment variables."""
    return dict(os.environ)


def slurm_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return SLURM's variables of this process."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name.startswith("SLURM_")}


def with_master(info: RankInfo, *, interface: str = "auto", seconds: float) -> RankInfo:
    """Return `info` with a master address; see `launcher/rank/mpi.py`, which is asked for it where mpirun set none."""
    if info.master_addr:
        return info
    return master_over_mpi(info, os.environ, interface=interface, seconds=seconds)


def coordinator_address(environ: Mapping[str, str] | None = None) -> tuple[str, int, str] | None:
    """Return address, port and nonce of MEGALITE_COORDINATOR, which `megalite launch` sets; None without it.

    Raises LaunchError for a value of another form.
    """
    value = (os.environ if environ is None else environ).get("MEGALITE_COORDINATOR", "").strip()
    if not value:
        return None
    parts = re.fullmatch(r"\[?([^/\]\s]+)\]?:([0-9]{1,5})/([0-9a-zA-Z]+)", value)
    if parts is None:
        raise LaunchError(
            f"MEGALITE_COORDINATOR = {value!r} is not ADDRESS:PORT/NONCE; megalite launch sets it: unset it elsewhere"
        )
    return parts[1], int(parts[2]), parts[3]


def watched_by_launcher() -> bool:
    """Whether the process of `megalite launch` is this job's coordinator, and shows why the job failed."""
    return coordinator_address() is not None


def meets_others(info: RankInfo) -> bool:
    """Whether a rank of a launcher joins a coordinator: there are others, or `megalite launch` watches it."""
    return info.world_size > 1 or watched_by_launcher()


def agent_owns_port(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun's agent listens at MASTER_PORT, with the store that it shares with its ranks."""
    environ = os.environ if environ is None else environ
    return "TORCHELASTIC_RUN_ID" in environ and environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"


def without_apex(environ: Mapping[str, str] | None = None) -> bool:
    """Whether MEGALITE_NO_APEX=1 turns NVIDIA Apex off."""
    return (os.environ if environ is None else environ).get("MEGALITE_NO_APEX", "") == "1"


def trust_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the operators' self-test results: MEGALITE_TRUST_FOLDER, or in the user's cache."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("MEGALITE_TRUST_FOLDER", "")
    return Path(chosen) if chosen else _user_cache(environ) / "megalite" / "trust"


def api_key(environ: Mapping[str, str] | None = None) -> str:
    """Return MEGALITE_API_KEY, the key that requests to `megalite serve` need; "" if it is not set."""
    return (os.environ if environ is None else environ).get("MEGALITE_API_KEY", "").strip()


def threads_per_rank(
    local_ranks: int, info: RankInfo | None = None, environ: Mapping[str, str] | None = None
) -> int:
    """Return OMP_NUM_THREADS if the user set it, else the cores of this node divided by its ranks, at least 1."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("OMP_NUM_THREADS", "")
    # torchrun sets OMP_NUM_THREADS=1 by default, so its 1 does not count; users can set training.threads.
    if (
        chosen.isdecimal()
        and int(chosen) > 0
        and not (info and info.launcher == "torchrun" and chosen == "1")
    ):
        return int(chosen)
    cores = available_cores()
    if info and info.launcher in ("slurm", "openmpi", "mpich"):
        # These may bind each rank to separate cores, or all ranks of the node to the same cores.
        on_node = environ.get("SLURM_CPUS_ON_NODE", "")
        shared = int(on_node) if on_node.isdecimal() else os.cpu_count() or 1
        return max(1, min(cores, shared // local_ranks))
    return max(1, cores // local_ranks)


def _user_cache(environ: Mapping[str, str]) -> Path:
    chosen = environ.get("XDG_CACHE_HOME", "")
    return Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".cache"
