"""Describes this machine for `megalite doctor`: cores, memory, programs, packages. No heavy imports."""

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from megalite.launcher.process import available_cores
from megalite.version import package_version

# name -> (purpose, consequence if it is missing)
PACKAGES = {
    "torch": ("tensors, autograd, collectives, pipelines", "nothing runs"),
    "deepspeed": ("ZeRO and offload", "no ZeRO: every rank keeps its whole optimizer state"),
    "transformers": ("the check of every export", "no export"),
    "tokenizers": ("tokenizers", "no data can be prepared"),
    "safetensors": ("checkpoints", "no checkpoint"),
    "sentencepiece": ("sentencepiece models", "only tokenizer.json files"),
    "pyarrow": ("parquet and Arrow files, folders of datasets", "text and .jsonl files only"),
    "tensorboard": ("monitor.report_to, optional", "metrics.jsonl has the same numbers"),
    "wandb": ("monitor.report_to, optional", "metrics.jsonl has the same numbers"),
    "mlflow-skinny": ("monitor.report_to, optional", "metrics.jsonl has the same numbers"),
    "starlette": ("megalite serve, optional", "no HTTP server: pip install 'megalite[serve]'"),
    "mpi4py": (
        "Open MPI's ranks on several hosts find rank 0",
        "mpirun -x MASTER_ADDR; torchrun, deepspeed, srun and MPICH work",
    ),
}
PROGRAMS = {
    "g++": (
        "compiles DeepSpeed's native optimizer",
        "deepspeed.native_optimizer and training.compile do not work",
    ),
    "ninja": ("compiles DeepSpeed's native optimizer", "deepspeed.native_optimizer does not work"),
    "nvcc": ("compiles CUDA kernels", "no compiled operators on a GPU"),
    "nvidia-smi": ("the GPU's driver", "no NVIDIA GPU can be used"),
    "srun": ("SLURM", "not a SLURM node"),
    "mpirun": ("MPI", "no mpirun launches"),
    "pdsh": ("the deepspeed launcher on several nodes", "use srun, torchrun or mpirun there"),
    "ssh": ("the deepspeed launcher and mpirun on several nodes", "use srun or torchrun there"),
}


NVIDIA_CARDS = Path("/proc/driver/nvidia/gpus")
"""The folder in which NVIDIA's driver lists the cards of this machine."""


@dataclass(frozen=True)
class MachineFinding:
    """A package or program; found: its version or path, "" if it is missing; without: what does not work then."""

    name: str
    found: str
    purpose: str
    without: str


def system() -> dict[str, str]:
    """Return facts of the machine as text."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "processor": f"{_processor()}, {available_cores()} of {os.cpu_count()} cores usable",
        "memory": f"{memory / 2**30:.1f} GiB, /dev/shm {_free('/dev/shm')}",
    }


def nvidia_cards(folder: Path = NVIDIA_CARDS) -> tuple[str, ...]:
    """Return the name of each NVIDIA card of this machine, as torch has it; empty where the driver lists none."""
    names = []
    for card in sorted(folder.glob("*/information")):
        fields = dict(line.split(":", 1) for line in card.read_text().splitlines() if ":" in line)
        names.append(fields.get("Model", "").strip())
    return tuple(filter(None, names))


def packages() -> list[MachineFinding]:
    return [MachineFinding(name, package_version(name), *words) for name, words in PACKAGES.items()]


def programs() -> list[MachineFinding]:
    return [MachineFinding(name, shutil.which(name) or "", *words) for name, words in PROGRAMS.items()]


def apex() -> MachineFinding:
    """Look for NVIDIA Apex by its compiled extension, because the package `apex` on PyPI is another project."""
    purpose, without = "NVIDIA's fused optimizers, optional", "torch's own are used"
    if importlib.util.find_spec("apex") is None:
        return MachineFinding("apex", "", purpose, without)
    if importlib.util.find_spec("amp_C") is None:
        return MachineFinding("apex", "", purpose, f"the installed one has no compiled parts; {without}")
    return MachineFinding("apex", package_version("apex") or "built from source", purpose, without)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _free(folder: str) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB free"
    except OSError:
        return "missing"
