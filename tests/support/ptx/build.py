"""Builds the interpreter's input: a .cu file's PTX and compiled host code, linked with a CUDA runtime of the tests.

The host code is the production library's, compiled by the same nvcc, so grids, shared memory and arguments are real.
Results are cached in build/ptx by a digest of all inputs.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from megalite.ops.extension import SOURCES

EMULATOR = Path(__file__).parents[2] / "kernels" / "emulator"
KEPT = Path(__file__).parents[3] / "build" / "ptx"
WHY_NOT = (
    "" if shutil.which("nvcc") and shutil.which("g++") else "no nvcc and g++ to compile the kernels with"
)
_FLAGS = ["-std=c++20", "-O3", f"-I{SOURCES}", "-Xcompiler", "-fPIC"]


def compiled(name: str, arch: int | str = 80) -> tuple[str, Path]:
    """Return the PTX of csrc/cuda/<name>.cu for compute_<arch>, and the library of its host code."""
    sources = [each for each in sorted(SOURCES.rglob("*")) if each.suffix in (".h", ".cuh")]
    sources += [SOURCES / "cuda" / f"{name}.cu", EMULATOR / "runtime.cpp", EMULATOR / "chip.h"]
    folder = _kept([_nvcc(), *_FLAGS, str(arch), name], sources, lambda folder: _compile(name, arch, folder))
    return (folder / f"{name}.ptx").read_text(), folder / f"{name}.so"


@functools.cache
def arithmetic_library() -> ctypes.CDLL:
    """Return the functions of emulator/fused.cpp."""
    source = EMULATOR / "fused.cpp"

    def make(folder: Path) -> None:
        # Without -frounding-math the compiler may move arithmetic across a change of the rounding mode.
        flags = ["-std=c++20", "-O2", "-frounding-math", "-shared", "-fPIC"]
        _run(["g++", *flags, str(source), "-o", str(folder / "fused.so")])

    return ctypes.CDLL(str(_kept(["fused"], [source], make) / "fused.so"))


@functools.cache
def _nvcc() -> str:
    """Return nvcc's version, because another version emits other PTX."""
    return _run(["nvcc", "--version"])


def _compile(name: str, arch: int | str, folder: Path) -> None:
    code = f"arch=compute_{arch},code=compute_{arch}"
    made = ["-keep", "-keep-dir", str(folder), "-c", str(SOURCES / "cuda" / f"{name}.cu")]
    _run(["nvcc", *_FLAGS, f"-gencode={code}", *made, "-o", str(folder / f"{name}.o")])
    linked = [str(folder / f"{name}.o"), str(EMULATOR / "runtime.cpp")]
    # Functions of other files return that there is no kernel.
    undefined = _run(["nm", "-u", str(folder / f"{name}.o")]).split()
    stubs = folder / "stubs.cpp"
    functions = [each for each in undefined if each.startswith("megalite_")]
    stubs.write_text("\n".join(f'extern "C" int {each}() {{ return -1; }}' for each in functions))
    linked.append(str(stubs))
    _run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *linked, "-o", str(folder / f"{name}.so")])


def _kept(words: list[str], sources: list[Path], make: Callable[[Path], None]) -> Path:
    """Return the cached folder; fill it by `make` if it is missing."""
    digest = hashlib.sha256("\0".join(words).encode())
    for source in sources:
        digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    folder = KEPT / f"{words[-1]}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as made:
        make(Path(made))
        kept = Path(made) / "kept"
        kept.mkdir()
        for each in Path(made).iterdir():
            if each.suffix in (".ptx", ".so"):
                each.rename(kept / each.name)
        try:
            kept.rename(folder)
        except OSError:  # another process was faster
            assert folder.exists()
    return folder


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
