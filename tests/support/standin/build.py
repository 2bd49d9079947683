"""Compile the stand-in accelerator once per machine, into `build/standin/` of the repository."""

import fcntl
import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "build" / "standin"
# Sources that are compiled together: most of the time goes into torch's headers, once a unit.
UNITS = (("runtime", "generator", "device", "kernels"), ("group", "module"))
TORCH = Path(torch.__file__).parent
OPTIONS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-Wall", "-Wno-interference-size")
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def load() -> ModuleType:
    """Return the compiled module; build it first if there is none of these sources and this torch."""
    spec = importlib.util.spec_from_file_location("_standin", library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """Return the shared library's path; concurrent processes build it only once."""
    built = FOLDER / _digest() / "_standin.so"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


def _digest() -> str:
    files = [*sorted(HERE.glob("*.cpp")), *sorted(HERE.glob("*.h")), Path(__file__)]
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(content + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]


def _build(built: Path) -> None:
    headers = [
        HERE,
        TORCH / "include",
        TORCH / "include/torch/csrc/api/include",
        sysconfig.get_path("include"),
    ]
    options = [*OPTIONS, *(f"-I{header}" for header in headers)]
    units = {built.parent / f"{names[0]}-unit.cpp": names for names in UNITS}
    for unit, names in units.items():
        unit.write_text("".join(f'#include "{name}.cpp"\n' for name in names))
    objects = {unit: unit.with_suffix(".o") for unit in units}
    _run_all(["g++", *options, "-c", str(unit), "-o", str(made)] for unit, made in objects.items())
    # Renamed when complete, because other processes may look for it meanwhile.
    part = built.with_suffix(".part")
    libraries = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
    _run_all([["g++", "-shared", *map(str, objects.values()), *libraries, "-o", str(part)]])
    part.rename(built)


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run all commands in parallel. Raises RuntimeError with the compiler's output."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate()[1] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"the stand-in accelerator does not compile: {process.args}\n{text}")
