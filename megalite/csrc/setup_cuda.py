"""Chooses nvcc, its host compiler and the compute capabilities for csrc/cuda; used by setup.py.

Drivers: nvcc's CUDA runtime is linked statically. The runtime and the machine code of CUDA N.x run with every driver
for CUDA N.0 or newer, as do torch's. An nvcc with torch's major version or an older one therefore runs with every
driver that torch runs with, and is preferred. A newer nvcc is used if there is no other, and the record says that the
library needs a newer driver. PTX needs a driver for nvcc's full version, because the driver compiles it.
megalite/ops/extension.py checks these rules against the installed driver.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OLDEST_NVCC = (12, 0)
"""The oldest nvcc with C++20 and sm_90a."""
OLDEST_CHIP = (8, 0)
"""The oldest compute capability with bf16 products and asynchronous copies."""
TOOLKITS = Path("/usr/local")
"""The folder in which CUDA's installer creates cuda/ and cuda-12.8/."""
HOSTS = ("g++", "g++-14", "g++-13", "g++-12", "g++-11", "clang++")
"""The host compilers to try if nvcc works neither with the C++ compiler nor with its default."""
LIMIT = 120
"""The timeout of a compiler call in seconds; a compiler on a network disk may take half a minute."""
SILENCE = f"no answer within {LIMIT} s"
OTHER_HOME = "CUDA_HOME=/usr/local/cuda-12.8"
NO_CUDA = "MEGALITE_CUDA=0 builds without CUDA kernels"
PROBE = """#include <cuda_bf16.h>
#include <span>
__global__ void probe(__nv_bfloat16* to, const void* from) {
  __shared__ alignas(16) unsigned char tile[16];
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  *to = __float2bfloat16(static_cast<float>(tile[threadIdx.x]));
}
extern "C" int megalite_probe(void* to, const void* from) {
  const std::span<__nv_bfloat16> numbers(static_cast<__nv_bfloat16*>(to), 1);
  probe<<<1, 1>>>(numbers.data(), from);
  return cudaGetLastError();
}
"""


class NoCudaError(Exception):
    """No CUDA kernels can be compiled; the message has the reason and the remedy."""


@dataclass(frozen=True)
class Toolkit:
    """An nvcc that works with a host compiler.

    host: the argument of -ccbin; "": nvcc's default. codes: compute capabilities with machine code ("8.0", "9.0a").
    ptx: compute capabilities with PTX. libraries: the linker options of the static runtime.
    """

    nvcc: str
    version: str
    host: str
    host_version: str
    codes: tuple[str, ...]
    ptx: tuple[str, ...]
    libraries: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        return [self.nvcc, *host_options(self.host)]


@dataclass(frozen=True)
class CommandOutput:
    """The output of a command, and its error in one line, or ""."""

    output: str
    complaint: str


def ask(command: list[str], folder: str | None = None) -> CommandOutput:
    """Run a command for at most LIMIT seconds; after that, kill it with all its child processes."""
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
    except OSError as error:
        return CommandOutput("", f"{command[0]} cannot be run ({error.strerror})")
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return CommandOutput("", SILENCE)
        raise
    if process.returncode < 0:
        return CommandOutput(output, f"killed by {signal.Signals(-process.returncode).name}")
    if process.returncode > 0:
        return CommandOutput(
            output, main_line(errors or output) or f"exit code {process.returncode}, no reason given"
        )
    return CommandOutput(output + errors, "")


def main_line(said: str) -> str:
    """Return the first line of a compiler's or linker's output that names an error, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    pattern = r"\b(error|fatal|cannot find|undefined reference|killed)\b"
    telling = [line for line in lines if re.search(pattern, line, re.IGNORECASE)]
    return (telling or lines[-1:] or [""])[0][:300]


def numbers(version: str) -> tuple[int, ...]:
    """Return (major, minor) of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_toolkit(environ: Mapping[str, str], cxx: str, torch_cuda: str) -> Toolkit:
    """Return the nvcc, host compiler and compute capabilities for which a test kernel compiles and links.

    cxx: the C++ compiler, which links. torch_cuda: the CUDA version of torch, "" for a torch without CUDA.
    Raises NoCudaError if no nvcc works, with the reason of the first one, and ValueError if MEGALITE_ARCHS is invalid.
    """
    wanted = parse_archs(environ.get("MEGALITE_ARCHS", "auto"))
    hosts = host_compilers(environ, cxx)
    reasons: list[Exception] = []
    for nvcc, version in find_compilers(environ, torch_cuda):
        try:
            known = known_chips(nvcc)
            codes, ptx = wanted or choose_archs(known, visible_chips())
            check_known((*codes, *ptx), known, f"{nvcc} {version}")
            host, libraries = find_host(nvcc, version, hosts, cxx, arch_options(codes, ptx))
            return Toolkit(nvcc, version, host, compiler_version(host), codes, ptx, libraries)
        except (NoCudaError, ValueError) as error:
            reasons.append(error)
    raise reasons[0]


def find_compilers(environ: Mapping[str, str], torch_cuda: str) -> list[tuple[str, str]]:
    """Return (path, version) of the nvcc in CUDA_HOME, else of all in PATH and /usr/local; compatible ones first."""
    home = environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else [shutil.which("nvcc") or "", *installed_compilers()]
    here = [nvcc for nvcc in dict.fromkeys(candidates) if nvcc and Path(nvcc).exists()]
    if not here:
        where = f"in CUDA_HOME ({home})" if home else f"in PATH or {TOOLKITS}/cuda/bin, and no CUDA_HOME"
        raise NoCudaError(f"no nvcc {where}")
    found: list[tuple[str, str]] = []
    complaints: list[str] = []
    for nvcc in here:
        answer = ask([nvcc, "--version"])
        version = re.search(r"release \S+ V(\S+)", answer.output)
        if version is None:
            complaints.append(f"{nvcc} does not print its version: {answer.complaint or answer.output[:80]}")
        elif numbers(version[1]) < OLDEST_NVCC:
            complaints.append(f"{nvcc} {version[1]} is older than {dotted(OLDEST_NVCC)}")
        else:
            found.append((nvcc, version[1]))
    if not found:
        raise NoCudaError(f"{complaints[0]}; name another nvcc's folder ({OTHER_HOME})")
    return sorted(found, key=lambda each: bool(torch_cuda) and numbers(each[1])[0] > numbers(torch_cuda)[0])


def check_known(codes: tuple[str, ...], known: set[tuple[int, ...]], nvcc: str) -> None:
    """Raise ValueError if nvcc does not support one of the compute capabilities."""
    if unknown := [code for code in codes if numbers(code) not in known]:
        chips = ", ".join(dotted(chip) for chip in sorted(known) if chip >= OLDEST_CHIP)
        raise ValueError(
            f"MEGALITE_ARCHS has '{unknown[0]}', which {nvcc} does not support; it supports {chips}"
        )


def find_host(
    nvcc: str, version: str, hosts: list[str], cxx: str, archs: list[str]
) -> tuple[str, tuple[str, ...]]:
    """Return the first host compiler with which nvcc works, and the linker options of the CUDA runtime."""
    complaints: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for host in hosts:
            complaint = try_host(nvcc, host, archs, folder)
            if not complaint:
                return host, runtime_libraries(nvcc, host, cxx, folder)
            complaints[Path(host).name or "its own choice"] = complaint
            if complaint == SILENCE:
                break
    first, *others = complaints
    raise NoCudaError(
        f"{nvcc} {version} does not work with {first}: {complaints[first]}"
        + (f"; nor with {', '.join(others)}" if others else "")
        + "; install a host compiler that this nvcc takes and name it (CUDAHOSTCXX=g++-12), or name another nvcc's "
        f"folder ({OTHER_HOME})"
    )


def installed_compilers() -> list[str]:
    """Return the nvcc of each toolkit in /usr/local: the default toolkit first, then the newest."""
    versions = sorted(TOOLKITS.glob("cuda-*"), key=lambda folder: numbers(folder.name), reverse=True)
    return [str(folder / "bin" / "nvcc") for folder in (TOOLKITS / "cuda", *versions)]


def known_chips(nvcc: str) -> set[tuple[int, ...]]:
    """Return the compute capabilities that nvcc supports."""
    answer = ask([nvcc, "--list-gpu-code"])
    known: set[tuple[int, ...]] = {
        (int(code[:-1]), int(code[-1])) for code in re.findall(r"sm_(\d+)", answer.output)
    }
    if answer.complaint or not known:
        raise NoCudaError(f"{nvcc} does not list its architectures: {answer.complaint or answer.output[:80]}")
    return known


def visible_chips() -> set[tuple[int, ...]]:
    """Return the compute capabilities of this machine's GPUs; empty without a GPU, as on a login node."""
    if not (smi := shutil.which("nvidia-smi")):
        return set()
    answer = ask([smi, "--query-gpu=compute_cap", "--format=csv,noheader"])
    lines = [] if answer.complaint else answer.output.splitlines()
    return {numbers(line) for line in lines if re.fullmatch(r"\d+\.\d", line.strip())}


def parse_archs(wanted: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Parse "8.0+PTX;9.0a" to the compute capabilities (with machine code, with PTX); None for "auto"."""
    if wanted.strip() == "auto":
        return None
    codes: list[str] = []
    ptx: list[str] = []
    for arch in wanted.split(";"):
        parts = re.fullmatch(r"(\d+\.\d)([af]?)(\+PTX)?", arch.strip())
        if parts is None:
            raise ValueError(f"MEGALITE_ARCHS has '{arch}'; it is auto or a list like \"8.0+PTX;9.0a;12.0\"")
        chip, kind, keeps = parts.groups()
        if numbers(chip) < OLDEST_CHIP:
            raise ValueError(f"MEGALITE_ARCHS has '{arch}'; the kernels need {dotted(OLDEST_CHIP)} or newer")
        if kind and keeps:
            raise ValueError(
                f"MEGALITE_ARCHS has '{arch}', but PTX of {chip}{kind} runs on no later GPU; "
                f'add +PTX to a compute capability without a letter: "8.0+PTX;{chip}{kind}"'
            )
        codes.append(chip + kind)
        ptx += [chip] if keeps else []
    return tuple(dict.fromkeys(codes)), tuple(dict.fromkeys(ptx))


def choose_archs(
    known: set[tuple[int, ...]], visible: set[tuple[int, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the compute capabilities for "auto", as `parse_archs` does.

    The oldest one has machine code and PTX, which every later GPU can run. The visible GPUs have machine code as well;
    without a visible GPU 9.0a has, because it has a separate attention kernel.
    """
    oldest = min(chip for chip in known if chip >= OLDEST_CHIP)
    codes = {oldest: dotted(oldest)}
    for chip in visible or {(9, 0)}:
        # Machine code runs on later chips of the same major version.
        same = [each for each in known if each[0] == chip[0] and OLDEST_CHIP < each <= chip]
        if same and chip[0] != oldest[0]:
            codes[max(same)] = "9.0a" if max(same) == (9, 0) else dotted(max(same))
    return tuple(codes[chip] for chip in sorted(codes)), (dotted(oldest),)


def dotted(chip: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in chip)


def arch_options(codes: tuple[str, ...], ptx: tuple[str, ...]) -> list[str]:
    """Return nvcc's options for the compute capabilities with machine code and with PTX."""
    options = []
    for code in dict.fromkeys((*codes, *ptx)):
        bare = code.replace(".", "")
        # One option for both, because two options compile twice.
        kinds = [f"sm_{bare}"] * (code in codes) + [f"compute_{bare}"] * (code in ptx)
        options.append(f"-gencode=arch=compute_{bare},code=[{','.join(kinds)}]")
    return options


def host_compilers(environ: Mapping[str, str], cxx: str) -> list[str]:
    """Return the host compilers to try, in order, "" for nvcc's default; only the user's choice if there is one."""
    if named := environ.get("CUDAHOSTCXX") or environ.get("NVCC_CCBIN"):
        return [named]
    # g++ is usually a link to one of the numbered compilers.
    seen = {os.path.realpath(shutil.which(cxx) or cxx)}
    others = []
    for path in filter(None, map(shutil.which, HOSTS)):
        if os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            others.append(path)
    return [cxx, "", *others]


def host_options(host: str) -> list[str]:
    return ["-ccbin", host] if host else []


def compiler_version(compiler: str) -> str:
    return ask([compiler, "-dumpfullversion", "-dumpversion"]).output.strip() if compiler else ""


def try_host(nvcc: str, host: str, archs: list[str], folder: str) -> str:
    """Compile a test kernel to folder/probe.o with this host compiler; return the error message, or ""."""
    Path(folder, "probe.cu").write_text(PROBE)
    command = [nvcc, *host_options(host), "-std=c++20", "-O3", "-Xcompiler", "-fPIC", *archs]
    return ask([*command, "-c", "probe.cu", "-o", "probe.o"], folder).complaint


def runtime_libraries(nvcc: str, host: str, cxx: str, folder: str) -> tuple[str, ...]:
    """Return the linker options of nvcc's static runtime, after linking folder/probe.o with them."""
    # Only the output of --dryrun names nvcc's library folders.
    options = [*host_options(host), "--dryrun", "-shared", "-cudart=static", "probe.o", "-o", "probe.so"]
    said = ask([nvcc, *options], folder)
    folders = re.search(r"^#\$ LIBRARIES=(.*)$", said.output, re.MULTILINE)
    if folders is None:
        raise NoCudaError(
            f"{nvcc} does not print its library folders: {said.complaint or '--dryrun names none'}"
        )
    libraries = (*shlex.split(folders[1]), "-lcudart_static", "-lrt", "-lpthread", "-ldl")
    link = [cxx, "-shared", "-Wl,--no-undefined", "probe.o", *libraries, "-o", "probe.so"]
    if complaint := ask(link, folder).complaint:
        raise NoCudaError(
            f"{cxx} cannot link what {nvcc} compiles: {complaint}; install this toolkit's static runtime "
            f"(libcudart_static.a), or name another nvcc's folder ({OTHER_HOME})"
        )
    return libraries
