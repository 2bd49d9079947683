"""CUDA kernels compiled for this machine's CPU: a .cu file, over tests/kernels/emulator/cuda_runtime.h.

Runs the source that nvcc compiles thread by thread. Tests results, barriers and launch limits without a GPU; it cannot
test the machine code or the speed.
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
    """Replace CUDA's launches and dynamic shared memory, which are not C++, by calls of the emulator."""
    text = _LAUNCH.sub(r"emulator::launch(\1, \2)(", text)
    return _DYNAMIC.sub(r"auto* \2 = static_cast<\1*>(emulator::dynamic_shared());", text)


def emulated(name: str, folder: Path, *, without: str = "", but: str = "") -> ctypes.CDLL:
    """Build csrc/cuda/<name>.cu in `folder` and return the library. without: text whose first occurrence becomes `but`.

    A launch with a misaligned access returns an error.
    """
    library = folder / f"{name}.so"
    level = "-O0" if without and not but else "-O1"  # a broken library runs only once
    _compile(folder, [level, *_SHARED, str(_source(name, folder, without, but)), "-o", str(library)])
    return ctypes.CDLL(str(library))


def of_source(text: str, folder: Path) -> ctypes.CDLL:
    """Build `text`, kernels and launches in CUDA C++, and return the library."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(translated(text))
    _compile(folder, ["-O1", *_SHARED, str(source), "-o", str(library)])
    return ctypes.CDLL(str(library))


def on_chip(library: ctypes.CDLL, capability: int) -> None:
    """Set the chip whose limits apply, as compute capability times ten; the default is 90."""
    assert library.megalite_emulator_chip(capability)


def in_order(library: ctypes.CDLL, order: int) -> None:
    """Set the order in which runnable threads run; 0: ascending thread index, else a seed."""
    ctypes.c_uint.in_dll(library, "megalite_emulator_order").value = order


def races(name: str, folder: Path, *, without: str = "") -> str:
    """Return ThreadSanitizer's output for csrc/cuda/<name>.cu, run by the program emulator/run_<name>.cpp.

    Without a text of the source it is run up to ten times, until a race is seen.
    """
    program = folder / "program"
    driver = EMULATOR / f"run_{name}.cpp"
    sources = [str(_source(name, folder, without)), str(driver)]
    _compile(folder, ["-g", "-O1", "-fsanitize=thread", *sources, "-o", str(program)])
    # Without address randomisation: some Linux kernels map memory where the sanitizer needs its own.
    command = ["setarch", platform.machine(), "-R", str(program)]
    for _ in range(10 if without else 1):  # on a busy machine ThreadSanitizer can miss a race that is there
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "done" in done.stdout, done.stderr
        if "data race" in done.stderr:
            break
    return done.stderr


def _source(name: str, folder: Path, without: str, but: str = "") -> Path:
    """Write csrc/cuda/<name>.cu as C++, and the headers of csrc/cuda that the emulator does not replace."""
    source = folder / f"{name}.cpp"
    texts = {source: (SOURCES / "cuda" / f"{name}.cu").read_text()}
    (folder / "cuda").mkdir(exist_ok=True)
    for header in (SOURCES / "cuda").glob("*.cuh"):
        if not (EMULATOR / "cuda" / header.name).exists():
            texts[folder / "cuda" / header.name] = header.read_text()
    if without:
        broken = next((path for path, text in texts.items() if without in text), None)
        assert broken is not None, f"neither {name}.cu nor a header has {without}"
        texts[broken] = texts[broken].replace(without, but, 1)
    for path, text in texts.items():
        path.write_text(translated(text))
    return source


def _compile(folder: Path, arguments: list[str]) -> None:
    command = ["g++", "-std=c++20", f"-I{EMULATOR}", f"-I{folder}", f"-I{SOURCES}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
