"""Builds the package, and from megalite/csrc the library of compiled operators; the rest stands in pyproject.toml.

    python setup.py build_ext --inplace       # the library again, for a checkout: only what changed is compiled

Every .cpp under csrc/cpu and csrc/bind goes through the C++ compiler, every .cu under csrc/cuda through nvcc, as many
at once as there are cores; one library comes of them, with a record of what it holds, which megalite/ops/extension.py
reads. No GPU is needed, and torch for its headers only. Without a compiler, or without torch in the environment that
builds, megalite is pure Python and the record says why.

CXX             the C++ compiler (default: g++ or c++)
CUDA_HOME       where nvcc is (default: the one in PATH)
MEGALITE_CUDA   0: no CUDA kernels; 1: an error where they cannot be built; auto (default): what is possible
MEGALITE_ARCHS  the chips to compile for (default: "8.0;9.0a")
MEGALITE_CPU    the processors to compile for: x86-64-v3 (AVX2) or x86-64-v4 (AVX-512; default: what this machine has)
MAX_JOBS        how many compilers at once (default: the cores)
"""

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "megalite" / "csrc"
OBJECTS = ROOT / "build" / "kernels"
LIBRARY, RECORD = "libmegalite.so", "libmegalite.json"
STABLE_ABI = "2.11"
"""The oldest torch that the library runs with: bind/ uses nothing younger of torch's stable ABI."""
ARCHS = "8.0;9.0a"
NVCC = (12, 0)
"""The oldest with C++20 and sm_90a."""
# What levels of x86-64 mean, as /proc/cpuinfo names it; the best first.
_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
LEVELS = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
}
# Sums may be reordered into vector code; infinities and NaN keep their meaning.
MATH = ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
PROBE = """#include <span>
#include <omp.h>
int threads() { return std::span<int>{}.empty() ? omp_get_max_threads() : 0; }
"""


@dataclass(frozen=True)
class Tools:
    """What is here to build with; an empty `cxx` or `nvcc` is one that must do without, `why` says for what reason."""

    cxx: str
    cxx_version: str
    march: str
    torch: Path | None
    torch_version: str
    nvcc: str
    nvcc_version: str
    archs: tuple[str, ...]
    why: dict[str, str]


def find_tools(environ: dict[str, str]) -> Tools:
    why: dict[str, str] = {}
    cxx = environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or ""
    march = find_level(environ)
    torch, torch_version = find_torch()
    if platform.system() != "Linux":
        why["all"] = f"{platform.system()} is not supported"
    elif not cxx:
        why["all"] = "no C++ compiler (g++, c++ or CXX)"
    elif torch is None:
        why["all"] = torch_version
    elif complaint := try_compiler(cxx, march):
        why["all"] = f"{cxx} cannot compile C++20 with OpenMP: {complaint}"
    wanted = environ.get("MEGALITE_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SetupError(f"MEGALITE_CUDA is '{wanted}'; it is 0, 1 or auto")
    archs = tuple(arch.strip() for arch in environ.get("MEGALITE_ARCHS", ARCHS).split(";"))
    if bad := [arch for arch in archs if not re.fullmatch(r"\d+\.\d[af]?", arch)]:
        raise SetupError(f"MEGALITE_ARCHS has '{bad[0]}'; it reads like \"{ARCHS}\"")
    nvcc, nvcc_version = "", ""
    if wanted == "0":
        why["CUDA"] = "MEGALITE_CUDA=0"
    elif "all" not in why:
        nvcc, nvcc_version = find_nvcc(environ)
        if not nvcc:
            why["CUDA"] = nvcc_version
    if wanted == "1" and (complaint := why.get("all") or why.get("CUDA")):
        raise SetupError(f"MEGALITE_CUDA=1, but: {complaint}")
    version = output_of([cxx, "-dumpfullversion", "-dumpversion"]) if "all" not in why else ""
    return Tools(cxx, version, march, torch, torch_version, nvcc, nvcc_version, archs, why)


def find_level(environ: dict[str, str]) -> str:
    """The level of x86-64 to compile for; empty for the compiler's own choice, as on other processors."""
    wanted = environ.get("MEGALITE_CPU", "")
    if wanted and wanted not in LEVELS:
        raise SetupError(f"MEGALITE_CPU is '{wanted}'; it is one of {', '.join(LEVELS)}")
    found = [level for level, flags in LEVELS.items() if cpu_flags() >= flags]
    return wanted or next(iter(found), "")


def cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def find_torch() -> tuple[Path | None, str]:
    """Torch's folder and version without importing it; without it, why not."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, (
            "torch is not in the environment that builds; with torch installed: "
            "pip install --no-build-isolation megalite's folder"
        )
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text()
    version = re.search(r"__version__ = '([^']+)'", text)
    if version is None or not (folder / "include/torch/csrc/stable/library.h").exists():
        return None, f"the torch in {folder} has no headers of the stable ABI"
    if numbers(version[1]) < numbers(STABLE_ABI):
        return None, f"torch {version[1]} is older than {STABLE_ABI}"
    return folder, version[1]


def find_nvcc(environ: dict[str, str]) -> tuple[str, str]:
    """nvcc and its version; without it, an empty name and why not."""
    home = environ.get("CUDA_HOME")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or ""
    if not nvcc or not Path(nvcc).exists():
        return "", f"no nvcc in CUDA_HOME ({home})" if home else "no nvcc in PATH, and no CUDA_HOME"
    version = re.search(r"release \S+ V(\S+)", output_of([nvcc, "--version"]))
    if version is None or numbers(version[1]) < NVCC:
        return "", f"{nvcc} is older than {NVCC[0]}.{NVCC[1]}"
    return nvcc, version[1]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def try_compiler(cxx: str, march: str) -> str:
    """What the compiler complains of in a few lines of what the sources are made of; empty where it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(PROBE)
        flags = ["-std=c++20", "-fopenmp", *([f"-march={march}"] if march else []), "-shared", "-fPIC"]
        try:
            done = subprocess.run(
                [cxx, *flags, str(source), "-o", f"{folder}/probe.so"],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


@dataclass(frozen=True)
class Object:
    """One translation unit: its source in csrc, and the command, run there, that makes `path` of it."""

    source: Path
    path: Path
    command: list[str]
    compiler: str

    @property
    def record(self) -> Path:
        return self.path.with_suffix(".json")

    def is_current(self) -> bool:
        """Whether it was made by this command from these very sources."""
        if not self.path.exists() or not self.record.exists():
            return False
        made = json.loads(self.record.read_text())
        return (made["command"], made["compiler"]) == (self.command, self.compiler) and all(
            (CSRC / name).exists() and digest(CSRC / name) == was for name, was in made["sources"].items()
        )

    def make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        makefile, partial = self.path.with_suffix(".d"), self.path.with_suffix(f".{os.getpid()}.o")
        command = [*self.command, "-MMD", "-MF", str(makefile), "-c", str(self.source), "-o", str(partial)]
        done = subprocess.run(command, cwd=CSRC, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            partial.unlink(missing_ok=True)
            remedy = "\nMEGALITE_CUDA=0 builds without CUDA kernels" if self.source.suffix == ".cu" else ""
            raise SetupError(f"{' '.join(command)}\n{done.stdout}{done.stderr}{remedy}")
        _, _, words = makefile.read_text().replace("\\\n", " ").partition(":")
        read = {(CSRC / word).resolve() for word in words.split()}
        names = sorted(str(path.relative_to(CSRC)) for path in read if path.is_relative_to(CSRC))
        made = {
            "command": self.command,
            "compiler": self.compiler,
            "sources": {name: digest(CSRC / name) for name in names},
            "kernels": kernels_of(done.stderr),
        }
        partial.replace(self.path)
        self.record.write_text(json.dumps(made, indent=1))
        for line in done.stderr.splitlines():
            if "warning" in line:
                print(line, file=sys.stderr)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def kernels_of(said: str) -> list[dict[str, object]]:
    """What `ptxas -v` says each kernel takes: registers a thread, bytes of stack and of spilled registers."""
    pattern = (
        r"Compiling entry function '(\S+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    return [
        {
            "kernel": name,
            "arch": arch,
            "registers": int(registers),
            "stack": int(stack),
            "spilled": int(stores) + int(loads),
        }
        for name, arch, stack, stores, loads, registers in re.findall(pattern, said, re.DOTALL)
    ]


def objects_of(tools: Tools) -> list[Object]:
    """The longest to compile first."""
    host = ["-std=c++20", "-O3", "-fPIC", "-Wall", "-Wextra", "-I."]
    march = [f"-march={tools.march}"] if tools.march else []
    if tools.march == "x86-64-v4":
        march.append("-mprefer-vector-width=512")  # else compilers stop at 256, for processors that slow down
    numeric_abi = sum(number << shift for number, shift in zip(numbers(STABLE_ABI), (56, 48), strict=True))
    torch_headers = ["-isystem", f"{tools.torch}/include", f"-DTORCH_TARGET_VERSION={numeric_abi:#018x}"]
    cuda = ["-DMEGALITE_CUDA"] if tools.nvcc else []
    codes = [
        f"-gencode=arch=compute_{code},code=sm_{code}" for code in (a.replace(".", "") for a in tools.archs)
    ]
    device = ["-std=c++20", "-O3", "-I.", "-Xcompiler", "-fPIC,-Wall", "-Xptxas", "-v"]
    commands = {
        "cuda": [tools.nvcc, "-ccbin", tools.cxx, *device, *codes],
        "cpu": [tools.cxx, *host, *march, "-fopenmp", *MATH],
        "bind": [tools.cxx, *host, *torch_headers, *cuda],
    }
    versions = {"cuda": tools.nvcc_version + tools.cxx_version, "cpu": tools.cxx_version}
    versions["bind"] = f"{tools.cxx_version}, torch {tools.torch_version}"
    return [
        Object(source.relative_to(CSRC), OBJECTS / folder / f"{source.stem}.o", command, versions[folder])
        for folder, command in commands.items()
        if folder != "cuda" or tools.nvcc
        for source in sorted((CSRC / folder).glob("*.cu" if folder == "cuda" else "*.cpp"))
    ]


def link(tools: Tools, objects: list[Object], library: Path) -> None:
    """nvcc links where there are CUDA kernels, since it knows where its runtime is."""
    torch = ["-Xlinker", "--no-as-needed", f"-L{tools.torch}/lib", "-ltorch", "-ltorch_cpu"]
    partial = library.with_suffix(f".{os.getpid()}.so")
    if tools.nvcc:
        command = [tools.nvcc, "-ccbin", tools.cxx, "-shared", "-cudart=static", "-Xcompiler", "-fopenmp"]
    else:
        command = [tools.cxx, "-shared", "-fopenmp"]
    command += [*(str(each.path) for each in objects), *torch, "-ldl", "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    partial.replace(library)


def sources_digest() -> str:
    """As megalite.ops.extension computes it, to know a library that was built from other sources."""
    whole = hashlib.sha256()
    for path in sorted(each for each in CSRC.rglob("*") if each.suffix in (".h", ".cuh", ".cpp", ".cu")):
        whole.update(f"{path.relative_to(CSRC).as_posix()}\0{digest(path)}\n".encode())
    return whole.hexdigest()


def build(tools: Tools, folder: Path) -> str:
    """Puts library and record into `folder`; one line about them."""
    folder.mkdir(parents=True, exist_ok=True)
    library, record = folder / LIBRARY, folder / RECORD
    started, compiled = time.monotonic(), ""
    content: dict[str, object] = {"library": "all" not in tools.why, "left_out": tools.why}
    if "all" in tools.why:
        library.unlink(missing_ok=True)
        said = f"megalite: pure Python, no compiled operators: {tools.why['all']}"
    else:
        objects = objects_of(tools)
        stale = [each for each in objects if not each.is_current()]
        jobs = int(os.environ.get("MAX_JOBS", 0)) or len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(Object.make, stale))
        link(tools, objects, library)
        chips = f"CUDA {', '.join(tools.archs)}" if tools.nvcc else f"no CUDA: {tools.why['CUDA']}"
        content |= {
            "torch": tools.torch_version,
            "stable_abi": STABLE_ABI,
            "machine": platform.machine(),
            "cpu": tools.march,
            "cpu_flags": sorted(LEVELS[tools.march]) if tools.march else [],
            "archs": list(tools.archs) if tools.nvcc else [],
            "cxx": f"{Path(tools.cxx).name} {tools.cxx_version}",
            "nvcc": tools.nvcc_version if tools.nvcc else "",
            "sources": sources_digest(),
            "kernels": {
                str(each.source): json.loads(each.record.read_text())["kernels"]
                for each in objects
                if each.source.suffix == ".cu"
            },
        }
        said = (
            f"megalite: compiled operators for CPU {tools.march or platform.machine()} "
            f"({content['cxx']}) and {chips}"
        )
        compiled = f"; {len(stale)} of {len(objects)} files compiled in {time.monotonic() - started:.0f} s"
    partial = record.with_suffix(f".{os.getpid()}.json")
    partial.write_text(json.dumps(content | {"said": said}, indent=1) + "\n")
    partial.replace(record)
    return said + compiled


class BuildKernels(build_ext):
    """In place of setuptools' own: one library, no Python module."""

    def run(self) -> None:
        print(build(find_tools(dict(os.environ)), self._folder()), flush=True)

    def _folder(self) -> Path:
        in_place = self.inplace or self.editable_mode
        return (ROOT if in_place else Path(self.build_lib)) / "megalite" / "ops"

    def get_outputs(self) -> list[str]:
        return [str(path) for name in (LIBRARY, RECORD) if (path := self._folder() / name).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    """The library is for a machine, and for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


SOURCES = [each.relative_to(ROOT).as_posix() for each in sorted(CSRC.rglob("*.c*")) if each.suffix != ".cuh"]
HEADERS = [each.relative_to(ROOT).as_posix() for each in sorted(CSRC.rglob("*.*h"))]

setup(
    ext_modules=[Extension("megalite.ops.libmegalite", SOURCES, depends=HEADERS)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
