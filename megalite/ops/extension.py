"""The library of compiled operators, which setup.py builds from megalite/csrc: its only importer.

It is loaded when this module is first imported. Where there is none, or one that does not fit torch, the processor or
the sources beside it, `why_not` says so, and the operators have their plain forms only.
"""

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).parent / "libmegalite.so"
SOURCES = Path(__file__).parents[1] / "csrc"
# Of the stable ABI's versions; what a machine has not run, it does not claim.
TORCH_VERSIONS = "2.11 or newer by its stable ABI; run with 2.11, 2.13 and 2.15, not run with 2.12 and 2.14"
REBUILD = "build it: python setup.py build_ext --inplace in a checkout, else install megalite again"


@dataclass(frozen=True)
class Built:
    """What the record beside the library says: setup.py's own words and facts.

    archs: compute capabilities of its CUDA kernels, none where it has no CUDA kernels. left_out: what is
    missing -> why. sources: the digest of what it was compiled from.
    """

    library: bool = False
    said: str = "megalite was installed without being built"
    left_out: dict[str, str] = field(default_factory=dict)
    torch: str = ""
    stable_abi: str = ""
    machine: str = ""
    cpu: str = ""
    cpu_flags: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    cxx: str = ""
    nvcc: str = ""
    sources: str = ""
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@cache
def built() -> Built:
    """The record of the last build; an empty one where there is none."""
    record = LIBRARY.with_suffix(".json")
    if not record.exists():
        return Built()
    written = json.loads(record.read_text(encoding="utf-8"))
    # Another version's setup.py may say more or less.
    content: dict[str, Any] = {
        each.name: written[each.name] for each in fields(Built) if each.name in written
    }
    return Built(**content | {name: tuple(content.get(name, ())) for name in ("cpu_flags", "archs")})


def misfit(record: Built) -> str:
    """Why a library with this record must not be loaded here, and what to do; empty where it may."""
    if not record.library:
        return f"{record.left_out.get('all', record.said)}; {REBUILD}"
    if record.machine != platform.machine():
        return f"it was built for {record.machine}, this is {platform.machine()}; {REBUILD}"
    missing = sorted(set(record.cpu_flags) - _cpu_flags())
    if missing:
        return f"it was built for {record.cpu} processors, this one lacks {' '.join(missing)}; {REBUILD}"
    if _version(torch.__version__) < _version(record.stable_abi):
        return f"it needs torch {record.stable_abi} or newer, this is {torch.__version__}"
    if SOURCES.exists() and record.sources != sources_digest():
        return f"it was built from other sources than those in {SOURCES.name}/; {REBUILD}"
    return ""


def sources_digest(folder: Path = SOURCES) -> str:
    """One digest of all sources, as setup.py computes it."""
    whole = hashlib.sha256()
    suffixes = (".h", ".cuh", ".cpp", ".cu")
    for path in sorted(each for each in folder.rglob("*") if each.suffix in suffixes):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()}\0{digest}\n".encode())
    return whole.hexdigest()


@cache
def load() -> str:
    """Loads the library, once; why it was not, or nothing."""
    complaint = misfit(built())
    if complaint:
        return complaint
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"it cannot be loaded ({error}); {REBUILD}"
    return ""


def why_not(device_type: str) -> str:
    """Why compiled operators cannot run on devices of this type here; empty where they can."""
    complaint = load()
    if complaint or device_type == "cpu":
        return complaint
    if device_type != "cuda":
        return f"there are none for devices of type {device_type}"
    if torch.version.hip:
        return f"its kernels for GPUs are built for CUDA, this torch is for ROCm {torch.version.hip}"
    archs = built().archs
    if not archs:
        return f"the library has no CUDA kernels: {built().left_out['CUDA']}; {REBUILD}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    chip = torch.cuda.get_device_capability()
    if not any(_runs_on(arch, chip) for arch in archs):
        return (
            f"its CUDA kernels are for chips {', '.join(archs)}, this one is {chip[0]}.{chip[1]}; {REBUILD}"
        )
    return ""


def available(device_type: str) -> bool:
    """Whether compiled operators can run on devices of this type ("cpu", "cuda") here."""
    return not why_not(device_type)


def register(
    name: str,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Tells torch of operator megalite::<name> what it gives for tensors without data, and its gradient.

    Does nothing where the library is not loaded.
    """
    if load():
        return
    torch.library.register_fake(f"megalite::{name}", fake)
    if backward is not None:
        torch.library.register_autograd(f"megalite::{name}", backward, setup_context=setup_context)


def _runs_on(arch: str, chip: tuple[int, int]) -> bool:
    """Kernels run on later chips of the same generation, those for 9.0a on 9.0 alone."""
    major, minor = (int(number) for number in arch.rstrip("af").split("."))
    exact = arch.endswith("a")
    return chip == (major, minor) if exact else chip[0] == major and chip[1] >= minor


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def _version(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
