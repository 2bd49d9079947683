"""Loader of the library of compiled operators, which setup.py builds from megalite/csrc; no other module loads it.

The library is loaded when this module is first imported. If it is missing, or does not fit torch, the processor or the
sources in csrc/, `why_not` says so, and only the plain torch operators are used.
"""

import ctypes
import hashlib
import json
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).parent / "libmegalite.so"
SOURCES = Path(__file__).parents[1] / "csrc"
# torch versions with the stable ABI, and on which of them the tests have run.
TORCH_VERSIONS = "2.11 or newer by its stable ABI; run with 2.11, 2.13 and 2.15, not run with 2.12 and 2.14"
OLDEST_CHIP = (8, 0)
# As torch.library calls a kernel from its own nodes; without it a call passes autograd's kernel a second time.
_BELOW_AUTOGRAD: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "_AutoDispatchBelowAutograd", nullcontext
)
REBUILD = "build it: python setup.py build_ext --inplace in a checkout, else install megalite again"


@dataclass(frozen=True)
class Built:
    """The build record beside the library, written by setup.py.

    archs: compute capabilities that its CUDA kernels are machine code for; empty without CUDA kernels.
    ptx: compute capabilities of its PTX, which the driver compiles for later chips. nvcc: the version of nvcc and of
    the CUDA runtime in the library. left_out: missing part -> why. sources: the digest of the compiled sources.
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
    ptx: tuple[str, ...] = ()
    cxx: str = ""
    nvcc: str = ""
    sources: str = ""
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@cache
def built() -> Built:
    """Return the record of the last build; an empty record if there was none."""
    record = LIBRARY.with_suffix(".json")
    if not record.exists():
        return Built()
    written = json.loads(record.read_text(encoding="utf-8"))
    # The setup.py of another version may have written more or fewer fields.
    content: dict[str, Any] = {
        field.name: written[field.name] for field in fields(Built) if field.name in written
    }
    return Built(**content | {name: tuple(content.get(name, ())) for name in ("cpu_flags", "archs", "ptx")})


def misfit(record: Built) -> str:
    """Return why a library with this record must not be loaded here, with a remedy; empty if it may be loaded."""
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
    """Return one digest of all sources, as setup.py computes it."""
    whole = hashlib.sha256()
    suffixes = (".h", ".cuh", ".cpp", ".cu")
    for path in sorted(each for each in folder.rglob("*") if each.suffix in suffixes):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()}\0{digest}\n".encode())
    return whole.hexdigest()


@cache
def load() -> str:
    """Load the library once; return why it was not loaded, or an empty string."""
    complaint = misfit(built())
    if complaint:
        return complaint
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"it cannot be loaded ({error}); {REBUILD}"
    return ""


def why_not(device_type: str) -> str:
    """Return why compiled operators cannot run on devices of this type here; empty if they can."""
    complaint = load()
    if complaint or device_type == "cpu":
        return complaint
    if device_type != "cuda":
        return f"there are none for devices of type {device_type}"
    return built_for_visible_cards()


def built_for_visible_cards() -> str:
    """Return why the CUDA kernels cannot run on one of the GPUs that torch sees; empty if they run on all."""
    if torch.version.hip:
        return f"its kernels for GPUs are built for CUDA, this torch is for ROCm {torch.version.hip}"
    if not built().archs:
        return runs_on_chip(built(), (0, 0), None)
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    driver = driver_cuda_version()
    for index in range(torch.cuda.device_count()):
        if complaint := runs_on_chip(built(), torch.cuda.get_device_capability(index), driver):
            return f"GPU {index}: {complaint}"
    return ""


def runs_on_chip(
    record: Built, capability: tuple[int, int], driver_cuda_version: tuple[int, int] | None
) -> str:
    """Return why a library with this record cannot run on a chip and driver, with a remedy; empty if it can.

    capability: the chip's compute capability. driver_cuda_version: the newest CUDA version that the driver supports;
    None: unknown, assumed new enough. Rules: machine code of CUDA N.x runs with drivers for CUDA N.0 or newer,
    PTX with drivers for nvcc's own version or newer (docs.nvidia.com/deploy/cuda-compatibility).
    """
    if not record.archs:
        return f"the library has no CUDA kernels: {record.left_out.get('CUDA', record.said)}; {REBUILD}"
    nvcc = _version(record.nvcc)
    driver = driver_cuda_version or nvcc
    of_driver = f"this driver is for CUDA {driver[0]}.{driver[1]}"
    if driver[0] < nvcc[0]:
        return (
            f"its CUDA {nvcc[0]}.{nvcc[1]} runtime needs a driver for CUDA {nvcc[0]}.0 or newer, {of_driver}; "
            f"update the driver, or set CUDA_HOME to a toolkit of CUDA {driver[0]} and {REBUILD}"
        )
    if any(_runs_on(arch, capability) for arch in record.archs):
        return ""
    chip = f"{capability[0]}.{capability[1]}"
    remedy = f'set MEGALITE_ARCHS="{chip}{"a" if capability == (9, 0) else ""}" and {REBUILD}'
    if any(_version(ptx) <= capability for ptx in record.ptx):
        if driver >= nvcc:
            return ""
        return (
            f"it has no machine code for chip {chip}, and its PTX, of nvcc {nvcc[0]}.{nvcc[1]}, needs a driver for "
            f"CUDA {nvcc[0]}.{nvcc[1]} or newer, {of_driver}; update the driver, or {remedy}"
        )
    kinds = [*record.archs, *(f"{ptx} and newer" for ptx in record.ptx)]
    if capability < OLDEST_CHIP:
        remedy = f"there are none for chips older than {OLDEST_CHIP[0]}.{OLDEST_CHIP[1]}"
    return f"its CUDA kernels are for chips {', '.join(kinds)}, this one is {chip}; {remedy}"


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver supports, None if unknown. Initialises no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def available(device_type: str) -> bool:
    """Return whether compiled operators can run on devices of this type ("cpu", "cuda") here."""
    return not why_not(device_type)


def register(
    name: str,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register the fake (shape-only) implementation and the gradient of operator megalite::<name> with torch.

    Returns the operator for calls with all arguments, in order; if the library is not loaded, a function that says so.
    """
    if complaint := load():
        return partial(_refuse, complaint)
    torch.library.register_fake(f"megalite::{name}", fake)
    operator = getattr(torch.ops.megalite, name).default
    if backward is None or setup_context is None:
        return operator
    torch.library.register_autograd(f"megalite::{name}", backward, setup_context=setup_context)
    return _called_eagerly(name, operator, backward, setup_context)


def _refuse(complaint: str, *_: Any) -> Any:
    raise RuntimeError(f"the library of compiled operators is not loaded: {complaint}")


def _called_eagerly(
    name: str, operator: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None]
) -> Callable[..., Any]:
    """Return an operator with an autograd node of its own.

    That of torch.library enters Python from the dispatcher and packs its arguments again: twice the host's time.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        with _BELOW_AUTOGRAD():
            output = operator(*inputs)
        setup_context(ctx, inputs, output)
        return output

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    node: Any = type(f"megalite_{name}", (torch.autograd.Function,), functions)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*inputs)
        if torch.is_grad_enabled():
            return node.apply(*inputs)
        with _BELOW_AUTOGRAD():
            return operator(*inputs)

    return call


def _runs_on(arch: str, chip: tuple[int, int]) -> bool:
    """Return whether machine code for "8.0", "9.0a" or "10.0f" runs on a chip.

    Machine code also runs on later chips of the same generation, with the suffix f too; with the suffix a on exactly
    that chip only.
    """
    code = _version(arch.rstrip("af"))
    return chip == code if arch.endswith("a") else chip[0] == code[0] and chip[1] >= code[1]


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def _version(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
