"""Builds the package and the library of compiled operators from megalite/csrc; metadata is in pyproject.toml.

    python setup.py build_ext --inplace       # rebuilds the library in a checkout; compiles changed files only

The C++ compiler compiles every .cpp under csrc/cpu and csrc/bind, nvcc every .cu under csrc/cuda, in parallel. The
result is one library, and a record of its content for megalite/ops/extension.py. The build needs no GPU, and only the
headers of torch. Without a compiler, or without torch in the build environment, megalite is pure Python. If nvcc, its
host compiler and the linker do not work together, or a kernel does not compile, the library has no CUDA kernels. The
record gives the reason. megalite/csrc/setup_cuda.py chooses nvcc, and says which drivers run its code.

MEGALITE_OPERATORS  0: pure Python; 1: fail if the library cannot be built; auto (default): build it if possible
CXX             the C++ compiler (default: g++ or c++)
CUDA_HOME       the toolkit with nvcc (default: the first in PATH, /usr/local/cuda, /usr/local/cuda-* that fits torch)
CUDAHOSTCXX     nvcc's host compiler, or NVCC_CCBIN (default: CXX, else nvcc's default or another in PATH that works)
MEGALITE_CUDA   0: no CUDA kernels; 1: fail if they cannot be built; try: build them if possible, as the tests do;
                auto (default): build them if possible and torch is built for CUDA: they take most of the compile time
MEGALITE_ARCHS  the compute capabilities to compile for, such as "8.0+PTX;9.0a;10.0;12.0". auto (default): 8.0 with PTX,
                which the driver compiles for any later GPU when a kernel first runs there, and the GPUs that nvidia-smi
                lists, or 9.0a if it lists none
MEGALITE_CPU    the processors to compile for: x86-64-v3 (AVX2) or x86-64-v4 (AVX-512; default: those of this machine)
MAX_JOBS        the number of parallel compilers (default: the number of cores)
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "megalite" / "csrc"
sys.path.insert(0, str(CSRC))

from setup_cuda import (  # noqa: E402
    NO_CUDA,
    NoCudaError,
    Toolkit,
    arch_options,
    ask,
    compiler_version,
    find_toolkit,
    main_line,
    numbers,
)

OBJECTS = ROOT / "build" / "kernels"
LIBRARY, RECORD = "libmegalite.so", "libmegalite.json"
STABLE_ABI = "2.11"
"""The oldest torch that the library runs with: bind/ uses only this version of torch's stable ABI."""
# The CPU flags of each x86-64 level, as in /proc/cpuinfo; the best level first.
_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
LEVELS = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
}
SECONDS_A_SOURCE, SECONDS_A_KERNEL = 3, 6
"""The time to compile a C++ source and a CUDA source for two chips on one core, told before the work begins."""
SECONDS_A_LINE = 10
"""The time between two lines of progress."""
SHARED = ("examples", "launch")
"""Folders of the checkout that a wheel carries in megalite/_share, for `megalite examples`."""
# Allows reordered sums for vector code, but keeps infinities and NaN.
MATH = ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
PROBE = """#include <span>
#include <omp.h>
int threads() { return std::span<int>{}.empty() ? omp_get_max_threads() : 0; }
"""


@dataclass(frozen=True)
class Torch:
    """The torch of the build environment.

    folder: None if it cannot be used, for the reason `why`. cuda, hip: the versions of CUDA or ROCm that it is built
    for, or "".
    """

    folder: Path | None
    version: str = ""
    cuda: str = ""
    hip: str = ""
    why: str = ""


@dataclass(frozen=True)
class Tools:
    """The compilers and torch to build with.

    cuda_wanted: MEGALITE_CUDA. why: the reason for each missing part, under "all" (no library) or "CUDA" (no kernels).
    """

    cxx: str
    cxx_version: str
    march: str
    torch: Torch
    cuda: Toolkit | None
    cuda_wanted: str
    why: dict[str, str]

    @property
    def chips(self) -> str:
        """The compute capabilities of the CUDA kernels, as text."""
        if self.cuda is None:
            return f"no CUDA: {self.why['CUDA']}"
        ptx = [f"PTX {code}" for code in self.cuda.ptx]
        said = f"CUDA {', '.join([*self.cuda.codes, *ptx])} (nvcc {self.cuda.version}"
        if self.cuda.host != self.cxx:
            said += f" with {Path(self.cuda.host).name or 'its own host compiler'}"
        major = numbers(self.cuda.version)[0]
        if self.torch.cuda and major > numbers(self.torch.cuda)[0]:
            said += f"; needs a driver for CUDA {major}.0, torch one for {numbers(self.torch.cuda)[0]}.0"
        return f"{said})"


def find_tools(environ: dict[str, str]) -> Tools:
    why: dict[str, str] = {}
    cxx = environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or ""
    march = find_level(environ)
    torch = find_torch()
    if platform.system() != "Linux":
        why["all"] = f"{platform.system()} is not supported"
    elif not cxx:
        why["all"] = "no C++ compiler (g++, c++ or CXX)"
    elif torch.folder is None:
        why["all"] = torch.why
    elif complaint := try_compiler(cxx, march):
        why["all"] = f"{cxx} cannot compile C++20 with OpenMP: {complaint}"
    operators = choice_of(environ, "MEGALITE_OPERATORS", "0", "1", "auto")
    if operators == "0":
        why["all"] = "MEGALITE_OPERATORS=0"
    elif operators == "1" and "all" in why:
        raise SetupError(
            f"MEGALITE_OPERATORS=1, but: {why['all']}; MEGALITE_OPERATORS=0 installs without operators"
        )
    wanted = choice_of(environ, "MEGALITE_CUDA", "0", "1", "try", "auto")
    cuda = None
    if wanted == "0":
        why["CUDA"] = "MEGALITE_CUDA=0"
    elif torch.hip:
        why["CUDA"] = f"torch is built for ROCm {torch.hip}, whose GPUs run no CUDA kernels"
    elif wanted == "auto" and torch.folder is not None and not torch.cuda:
        why["CUDA"] = f"torch {torch.version} is for CPUs (MEGALITE_CUDA=1 builds them anyway)"
    elif "all" not in why:
        try:
            cuda = find_toolkit(environ, cxx, torch.cuda)
        except NoCudaError as error:
            why["CUDA"] = str(error)
        except ValueError as error:
            raise SetupError(str(error)) from error
    if wanted == "1" and (complaint := why.get("all") or why.get("CUDA")):
        raise SetupError(f"MEGALITE_CUDA=1, but: {complaint}; {NO_CUDA}")
    version = compiler_version(cxx) if "all" not in why else ""
    return Tools(cxx, version, march, torch, cuda, wanted, why)


def choice_of(environ: dict[str, str], name: str, *choices: str) -> str:
    """Return the value of a variable, by default the last choice; SetupError for a value that is no choice."""
    value = environ.get(name, choices[-1])
    if value not in choices:
        raise SetupError(f"{name} is '{value}'; it is {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def find_level(environ: dict[str, str]) -> str:
    """Return the x86-64 level to compile for; "" for the compiler's default, as on other processors."""
    wanted = environ.get("MEGALITE_CPU", "")
    if wanted and wanted not in LEVELS:
        raise SetupError(f"MEGALITE_CPU is '{wanted}'; it is one of {', '.join(LEVELS)}")
    found = [level for level, flags in LEVELS.items() if cpu_flags() >= flags]
    return wanted or next(iter(found), "")


def cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def find_torch() -> Torch:
    """Find torch and read its versions from its files, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        said = "torch is not in the environment that builds; with torch installed: "
        return Torch(None, why=f"{said}pip install --no-build-isolation megalite's folder")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text()
    said = {name: found for name, found in re.findall(r"^(\w+)\b[^=\n]*= '([^']+)'", text, re.MULTILINE)}
    version = said.get("__version__", "")
    remedy = f"install torch {STABLE_ABI} or newer"
    if not version or not (folder / "include/torch/csrc/stable/library.h").exists():
        return Torch(None, why=f"the torch in {folder} has no headers of the stable ABI; {remedy}")
    if numbers(version) < numbers(STABLE_ABI):
        return Torch(None, why=f"torch {version} is older than {STABLE_ABI}; {remedy}")
    return Torch(folder, version, said.get("cuda", ""), said.get("hip", ""))


def try_compiler(cxx: str, march: str) -> str:
    """Compile a small C++20 and OpenMP source; return the error message, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(PROBE)
        flags = ["-std=c++20", "-fopenmp", *([f"-march={march}"] if march else []), "-shared", "-fPIC"]
        return ask([cxx, *flags, str(source), "-o", f"{folder}/probe.so"]).complaint


class KernelError(SetupError):
    """A CUDA kernel that does not compile."""


@dataclass(frozen=True)
class Object:
    """A translation unit: its source in csrc, and the command, run in csrc, that compiles it to `path`."""

    source: Path
    path: Path
    command: list[str]
    compiler: str

    @property
    def record(self) -> Path:
        return self.path.with_suffix(".json")

    def is_current(self) -> bool:
        """Whether `path` was compiled with this command from the current sources."""
        if not self.path.exists() or not self.record.exists():
            return False
        made = json.loads(self.record.read_text())
        return (made["command"], made["compiler"]) == (self.command, self.compiler) and all(
            (CSRC / name).exists() and digest(CSRC / name) == was for name, was in made["sources"].items()
        )

    def make(self) -> None:
        """Compile the object; SetupError with the compiler's message, KernelError for a .cu file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        makefile, partial = self.path.with_suffix(".d"), self.path.with_suffix(f".{os.getpid()}.o")
        command = [*self.command, "-MMD", "-MF", str(makefile), "-c", str(self.source), "-o", str(partial)]
        done = subprocess.run(command, cwd=CSRC, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            partial.unlink(missing_ok=True)
            said = f"{self.source} does not compile: {main_line(done.stderr or done.stdout)}\n"
            said += f"{' '.join(command)}\n{done.stdout}{done.stderr}"
            raise KernelError(f"{said}\n{NO_CUDA}") if self.source.suffix == ".cu" else SetupError(said)
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
    """Parse `ptxas -v`: for each kernel the registers per thread and the bytes of stack and of register spills."""
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
    """Return all objects, the slowest to compile first."""
    host = ["-std=c++20", "-O3", "-fPIC", "-Wall", "-Wextra", "-I."]
    march = [f"-march={tools.march}"] if tools.march else []
    if tools.march == "x86-64-v4":
        march.append("-mprefer-vector-width=512")  # compilers default to 256, for older processors
    numeric_abi = sum(number << shift for number, shift in zip(numbers(STABLE_ABI), (56, 48), strict=True))
    torch_headers = [
        "-isystem",
        f"{tools.torch.folder}/include",
        f"-DTORCH_TARGET_VERSION={numeric_abi:#018x}",
    ]
    cuda = ["-DMEGALITE_CUDA"] if tools.cuda else []
    commands = {
        "cpu": [tools.cxx, *host, *march, "-fopenmp", *MATH],
        "bind": [tools.cxx, *host, *torch_headers, *cuda],
    }
    versions = {"cpu": tools.cxx_version, "bind": f"{tools.cxx_version}, torch {tools.torch.version}"}
    return kernel_objects(tools.cuda) + [
        Object(source.relative_to(CSRC), OBJECTS / folder / f"{source.stem}.o", command, versions[folder])
        for folder, command in commands.items()
        for source in sorted((CSRC / folder).glob("*.cpp"))
    ]


def kernel_objects(cuda: Toolkit | None) -> list[Object]:
    """Return the objects of csrc/cuda; the Hopper kernels, which are empty on other chips, are for 9.0a only."""
    if cuda is None:
        return []
    flags = ["-std=c++20", "-O3", "-I.", "-Xcompiler", "-fPIC,-Wall", "-Xptxas", "-v"]
    archs = hopper = arch_options(cuda.codes, cuda.ptx)
    if "9.0a" in cuda.codes:
        hopper = arch_options(("9.0a",), ())
    else:
        flags.append("-DMEGALITE_WITHOUT_SM90A")
    return [
        Object(
            source.relative_to(CSRC),
            OBJECTS / "cuda" / f"{source.stem}.o",
            [*cuda.command, *flags, *(hopper if "hopper" in source.stem else archs)],
            cuda.version + cuda.host_version,
        )
        for source in sorted((CSRC / "cuda").glob("*.cu"))
    ]


def link(tools: Tools, objects: list[Object], library: Path) -> None:
    """Link the library with the C++ compiler, even if nvcc has another host compiler."""
    torch = ["-Wl,--no-as-needed", f"-L{tools.torch.folder}/lib", "-ltorch", "-ltorch_cpu"]
    partial = library.with_suffix(f".{os.getpid()}.so")
    command = [tools.cxx, "-shared", "-fopenmp", *(str(each.path) for each in objects), *torch]
    command += [*(tools.cuda.libraries if tools.cuda else ["-ldl"]), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    partial.replace(library)


def compile_stale(objects: list[Object]) -> int:
    """Compile the objects that are not current and return their number; stop at the first failure."""
    stale = [each for each in objects if not each.is_current()]
    jobs = int(os.environ.get("MAX_JOBS", 0)) or len(os.sched_getaffinity(0))
    if stale:
        slow = sum(each.source.suffix == ".cu" for each in stale)
        seconds = (slow * SECONDS_A_KERNEL + (len(stale) - slow) * SECONDS_A_SOURCE) / min(jobs, len(stale))
        expected = "less than a minute" if seconds < 60 else f"about {round(seconds / 60)} min"
        tell(f"compiling {len(stale)} files, {slow} of them CUDA kernels, {jobs} at once: {expected}")
    told = started = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(each.make) for each in stale]
        try:
            for done, task in enumerate(as_completed(tasks), start=1):
                task.result()
                if (now := time.monotonic()) - told >= SECONDS_A_LINE:
                    told = now
                    tell(f"{done} of {len(stale)} files compiled after {now - started:.0f} s")
        except SetupError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(stale)


def tell(said: str) -> None:
    print(f"megalite: {said}", flush=True)


def compile_all(tools: Tools) -> tuple[Tools, list[Object], int]:
    """Return the tools, the objects and the number of compiled ones; a failing optional kernel turns CUDA off."""
    objects = objects_of(tools)
    try:
        return tools, objects, compile_stale(objects)
    except KernelError as error:
        if tools.cuda_wanted == "1":
            raise
        print(error, file=sys.stderr)
        reason = str(error).splitlines()[0]
    tools = replace(tools, cuda=None, why=tools.why | {"CUDA": reason})
    objects = objects_of(tools)
    return tools, objects, compile_stale(objects)


def sources_digest() -> str:
    """Return the same hash of the sources as megalite.ops.extension, which detects a library of other sources."""
    whole = hashlib.sha256()
    for path in sorted(each for each in CSRC.rglob("*") if each.suffix in (".h", ".cuh", ".cpp", ".cu")):
        whole.update(f"{path.relative_to(CSRC).as_posix()}\0{digest(path)}\n".encode())
    return whole.hexdigest()


def build(tools: Tools, folder: Path) -> str:
    """Write library and record into `folder`; return a one-line summary."""
    folder.mkdir(parents=True, exist_ok=True)
    library, record = folder / LIBRARY, folder / RECORD
    started, compiled = time.monotonic(), ""
    content: dict[str, object] = {"library": "all" not in tools.why}
    if "all" in tools.why:
        library.unlink(missing_ok=True)
        said = f"megalite: pure Python, no compiled operators: {tools.why['all']}"
    else:
        tools, objects, made = compile_all(tools)
        link(tools, objects, library)
        content |= {
            "torch": tools.torch.version,
            "stable_abi": STABLE_ABI,
            "machine": platform.machine(),
            "cpu": tools.march,
            "cpu_flags": sorted(LEVELS[tools.march]) if tools.march else [],
            "archs": list(tools.cuda.codes) if tools.cuda else [],
            "ptx": list(tools.cuda.ptx) if tools.cuda else [],
            "cxx": f"{Path(tools.cxx).name} {tools.cxx_version}",
            "nvcc": tools.cuda.version if tools.cuda else "",
            "sources": sources_digest(),
            "kernels": {
                str(each.source): json.loads(each.record.read_text())["kernels"]
                for each in objects
                if each.source.suffix == ".cu"
            },
        }
        said = (
            f"megalite: compiled operators for CPU {tools.march or platform.machine()} "
            f"({content['cxx']}) and {tools.chips}"
        )
        compiled = f"; {made} of {len(objects)} files compiled in {time.monotonic() - started:.0f} s"
    partial = record.with_suffix(f".{os.getpid()}.json")
    partial.write_text(json.dumps(content | {"left_out": tools.why, "said": said}, indent=1) + "\n")
    partial.replace(record)
    return said + compiled


class BuildKernels(build_ext):
    """Builds one library instead of the Python modules of setuptools."""

    def run(self) -> None:
        print(build(find_tools(dict(os.environ)), self._folder()), flush=True)

    def _folder(self) -> Path:
        in_place = self.inplace or self.editable_mode
        return (ROOT if in_place else Path(self.build_lib)) / "megalite" / "ops"

    def get_outputs(self) -> list[str]:
        return [str(path) for name in (LIBRARY, RECORD) if (path := self._folder() / name).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildPackage(build_py):
    """Copies SHARED into the package, but for the set-up of a checkout."""

    def run(self) -> None:
        super().run()
        for source, target in self._shared():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self._shared())]

    def _shared(self) -> list[tuple[Path, Path]]:
        """Return (file of the checkout, its copy); none for an editable install, which uses the checkout."""
        if self.editable_mode:
            return []
        share = Path(self.build_lib) / "megalite" / "_share"
        files = [path for name in SHARED for path in sorted((ROOT / name).rglob("*")) if path.is_file()]
        names = [path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts]
        return [(ROOT / name, share / name) for name in names if name != Path("examples/setup.sh")]


class PlatformWheel(bdist_wheel):
    """Tags the wheel: a library depends on the platform, but not on the Python version."""

    def run(self) -> None:
        if not self.skip_build:
            self.run_command("build")
            self.skip_build = True
        folder = Path(self.get_finalized_command("build").build_lib) / "megalite" / "ops"
        self.root_is_pure = not (folder / LIBRARY).exists()
        if self.root_is_pure:
            self.distribution.has_ext_modules = lambda: False
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


SOURCES = [
    each.relative_to(ROOT).as_posix() for each in sorted(CSRC.rglob("*.c*")) if each.suffix in (".cpp", ".cu")
]
HEADERS = [each.relative_to(ROOT).as_posix() for each in sorted(CSRC.rglob("*.*h"))]
HEADERS.append("megalite/csrc/setup_cuda.py")

setup(
    ext_modules=[Extension("megalite.ops.libmegalite", SOURCES, depends=HEADERS)],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage, "bdist_wheel": PlatformWheel},
)
