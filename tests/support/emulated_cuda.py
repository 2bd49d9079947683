"""CUDA kernels as functions for this machine's CPU: a .cu file, over tests/kernels/emulator/cuda_runtime.h.

The same source that nvcc compiles, run thread by thread: what it computes, whether its barriers suffice and whether it
stays within a launch's limits can be seen without a GPU; what the chip would make of it, and how fast, cannot.
"""

import ctypes
import platform
import re
import subprocess
from pathlib import Path

from megalite.ops.extension import SOURCES

EMULATOR = Path(__file__).parents[1] / "kernels" / "emulator"
_LAUNCH = re.compile(r"((?:\w+::)*\w+(?:<[^;<>]*>)?)\s*<<<(.*?)>>>\s*\(", re.DOTALL)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w\s]+?)\s+(\w+)\[\];")

_SHARED = ["-shared", "-fPIC", "-fsanitize=alignment"]


def translated(text: str) -> str:
    """CUDA C++ with its two constructs that are no C++ replaced by calls of the emulator."""
    text = _LAUNCH.sub(r"emulator::launch(\1, \2)(", text)
    return _DYNAMIC.sub(r"auto* \2 = static_cast<\1*>(emulator::dynamic_shared());", text)


def emulated(name: str, folder: Path, *, without: str = "") -> ctypes.CDLL:
    """The library of csrc/cuda/<name>.cu, built in `folder`; without: a text whose first occurrence is left out.

    A launch whose threads touch an address that is no multiple of what they touch there gives an error.
    """
    library = folder / f"{name}.so"
    level = "-O0" if without else "-O1"  # the broken one runs once
    _compile(folder, [level, *_SHARED, str(_source(name, folder, without)), "-o", str(library)])
    return ctypes.CDLL(str(library))


def of_source(text: str, folder: Path) -> ctypes.CDLL:
    """The library of kernels and launches that `text` is, in CUDA C++."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(translated(text))
    _compile(folder, ["-O1", *_SHARED, str(source), "-o", str(library)])
    return ctypes.CDLL(str(library))


def on_chip(library: ctypes.CDLL, capability: int) -> None:
    """Which chip's limits hold, by its compute capability times ten; 90 where it is not called."""
    assert library.megalite_emulator_chip(capability)


def in_order(library: ctypes.CDLL, order: int) -> None:
    """Which threads run first where several may; 0: those of the lowest numbers."""
    ctypes.c_uint.in_dll(library, "megalite_emulator_order").value = order


def races(name: str, folder: Path, *, without: str = "") -> str:
    """What ThreadSanitizer says of the kernels of csrc/cuda/<name>.cu in the program emulator/run_<name>.cpp."""
    program = folder / "program"
    driver = EMULATOR / f"run_{name}.cpp"
    sources = [str(_source(name, folder, without)), str(driver)]
    _compile(folder, ["-g", "-O1", "-fsanitize=thread", *sources, "-o", str(program)])
    # Some kernels place memory where the sanitizer has its own.
    command = ["setarch", platform.machine(), "-R", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "done" in done.stdout, done.stderr
    return done.stderr


def _source(name: str, folder: Path, without: str) -> Path:
    """csrc/cuda/<name>.cu in C++, and beside it the headers of csrc/cuda that the emulator has no others for."""
    source = folder / f"{name}.cpp"
    texts = {source: (SOURCES / "cuda" / f"{name}.cu").read_text()}
    (folder / "cuda").mkdir(exist_ok=True)
    for header in (SOURCES / "cuda").glob("*.cuh"):
        if not (EMULATOR / "cuda" / header.name).exists():
            texts[folder / "cuda" / header.name] = header.read_text()
    if without:
        broken = next((path for path, text in texts.items() if without in text), None)
        assert broken is not None, f"neither {name}.cu nor a header has {without}"
        texts[broken] = texts[broken].replace(without, "", 1)
    for path, text in texts.items():
        path.write_text(translated(text))
    return source


def _compile(folder: Path, arguments: list[str]) -> None:
    command = ["g++", "-std=c++20", f"-I{EMULATOR}", f"-I{folder}", f"-I{SOURCES}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
