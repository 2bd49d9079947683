"""setup.py's part for CUDA: which nvcc compiles csrc/cuda, with which host compiler, for which chips.

Drivers: the library has nvcc's own CUDA runtime in it, linked statically. The runtime and the machine code of CUDA N.x
run with every driver for CUDA N.0 or newer, and so do torch's. An nvcc of torch's major version, or of an older one,
therefore runs with every driver that this torch runs with, and is preferred. A newer one is taken where there is no
other; the record says that it needs a newer driver. PTX needs a driver for nvcc's full version, as the driver compiles
it. megalite/ops/extension.py holds these rules against the driver that it meets.
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
"""The oldest with C++20 and sm_90a."""
OLDEST_CHIP = (8, 0)
"""The oldest with bf16 products and asynchronous copies."""
TOOLKITS = Path("/usr/local")
"""Where CUDA's installer puts cuda/ and cuda-12.8/."""
HOSTS = ("g++", "g++-14", "g++-13", "g++-12", "g++-11", "clang++")
"""The host compilers to look for where nvcc refuses both the C++ compiler and its own default."""
LIMIT = 120
"""Seconds that a compiler has for an answer; a compiler on a network's disk may take half a minute."""
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
    """No CUDA kernels can be compiled here; its text is the reason, with what to do."""


@dataclass(frozen=True)
class Toolkit:
    """An nvcc that works with a host compiler.

    host: the argument of -ccbin, empty for nvcc's own choice. codes: compute capabilities to compile machine code for
    ("8.0", "9.0a"); ptx: those to keep PTX of. libraries: the linker's options for the static runtime.
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
class Answer:
    """What a command wrote, and in one line what went wrong: empty where nothing did."""

    output: str
    complaint: str


def ask(command: list[str], folder: str | None = None) -> Answer:
    """Run a command for at most LIMIT seconds; end it with all processes it started if it takes longer."""
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
        return Answer("", f"{command[0]} cannot be run ({error.strerror})")
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return Answer("", SILENCE)
        raise
    if process.returncode < 0:
        return Answer(output, f"killed by {signal.Signals(-process.returncode).name}")
    if process.returncode > 0:
        return Answer(
            output, main_line(errors or output) or f"exit code {process.returncode}, no reason given"
        )
    return Answer(output + errors, "")


def main_line(said: str) -> str:
    """The line of a compiler's or linker's messages that says what is wrong, else the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    pattern = r"\b(error|fatal|cannot find|undefined reference|killed)\b"
    telling = [line for line in lines if re.search(pattern, line, re.IGNORECASE)]
    return (telling or lines[-1:] or [""])[0][:300]


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_toolkit(environ: Mapping[str, str], cxx: str, torch_cuda: str) -> Toolkit:
    """The nvcc, host compiler and chips to compile with, after a probe compiled and linked.

    cxx: the C++ compiler, which links. torch_cuda: the CUDA version of torch, empty where it is built without.
    NoCudaError: nothing here works; the reason is that of the first nvcc. ValueError: MEGALITE_ARCHS is wrong.
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
    """Path and version of the nvcc in CUDA_HOME, else of each in PATH and /usr/local, those that fit torch first."""
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
            complaints.append(f"{nvcc} does not tell its version: {answer.complaint or answer.output[:80]}")
        elif numbers(version[1]) < OLDEST_NVCC:
            complaints.append(f"{nvcc} {version[1]} is older than {dotted(OLDEST_NVCC)}")
        else:
            found.append((nvcc, version[1]))
    if not found:
        raise NoCudaError(f"{complaints[0]}; name another nvcc's folder ({OTHER_HOME})")
    return sorted(found, key=lambda each: bool(torch_cuda) and numbers(each[1])[0] > numbers(torch_cuda)[0])


def check_known(codes: tuple[str, ...], known: set[tuple[int, ...]], nvcc: str) -> None:
    if unknown := [code for code in codes if numbers(code) not in known]:
        chips = ", ".join(dotted(chip) for chip in sorted(known) if chip >= OLDEST_CHIP)
        raise ValueError(f"MEGALITE_ARCHS has '{unknown[0]}', which {nvcc} does not know; it knows {chips}")


def find_host(
    nvcc: str, version: str, hosts: list[str], cxx: str, archs: list[str]
) -> tuple[str, tuple[str, ...]]:
    """The first host compiler that nvcc works with, and the linker's options for CUDA's runtime."""
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
    """The nvcc of each toolkit that CUDA's installer put into /usr/local: its default first, then the newest."""
    versions = sorted(TOOLKITS.glob("cuda-*"), key=lambda folder: numbers(folder.name), reverse=True)
    return [str(folder / "bin" / "nvcc") for folder in (TOOLKITS / "cuda", *versions)]


def known_chips(nvcc: str) -> set[tuple[int, ...]]:
    """The compute capabilities that nvcc compiles for."""
    answer = ask([nvcc, "--list-gpu-code"])
    known: set[tuple[int, ...]] = {
        (int(code[:-1]), int(code[-1])) for code in re.findall(r"sm_(\d+)", answer.output)
    }
    if answer.complaint or not known:
        raise NoCudaError(f"{nvcc} does not list its architectures: {answer.complaint or answer.output[:80]}")
    return known


def visible_chips() -> set[tuple[int, ...]]:
    """The compute capabilities of this machine's GPUs; empty where there are none, as on a login node."""
    if not (smi := shutil.which("nvidia-smi")):
        return set()
    answer = ask([smi, "--query-gpu=compute_cap", "--format=csv,noheader"])
    lines = [] if answer.complaint else answer.output.splitlines()
    return {numbers(line) for line in lines if re.fullmatch(r"\d+\.\d", line.strip())}


def parse_archs(wanted: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Chips with machine code, and chips with PTX too, of "8.0+PTX;9.0a"; None for "auto"."""
    if wanted.strip() == "auto":
        return None
    codes: list[str] = []
    ptx: list[str] = []
    for each in wanted.split(";"):
        parts = re.fullmatch(r"(\d+\.\d)([af]?)(\+PTX)?", each.strip())
        if parts is None:
            raise ValueError(f"MEGALITE_ARCHS has '{each}'; it is auto or a list like \"8.0+PTX;9.0a;12.0\"")
        chip, kind, keeps = parts.groups()
        if numbers(chip) < OLDEST_CHIP:
            raise ValueError(f"MEGALITE_ARCHS has '{each}'; the kernels need {dotted(OLDEST_CHIP)} or newer")
        if kind and keeps:
            raise ValueError(
                f"MEGALITE_ARCHS has '{each}', but PTX of {chip}{kind} runs on no later chip; "
                f'put +PTX behind one without a letter: "8.0+PTX;{chip}{kind}"'
            )
        codes.append(chip + kind)
        ptx += [chip] if keeps else []
    return tuple(dict.fromkeys(codes)), tuple(dict.fromkeys(ptx))


def choose_archs(
    known: set[tuple[int, ...]], visible: set[tuple[int, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Chips for "auto": the oldest as machine code and as PTX, which every later one runs; beside it the visible ones.

    Where no GPU is visible 9.0a stands beside it, whose attention has a kernel of its own.
    """
    oldest = min(chip for chip in known if chip >= OLDEST_CHIP)
    codes = {oldest: dotted(oldest)}
    for chip in visible or {(9, 0)}:
        # Code of a chip runs on later ones of its generation.
        same = [each for each in known if each[0] == chip[0] and OLDEST_CHIP < each <= chip]
        if same and chip[0] != oldest[0]:
            codes[max(same)] = "9.0a" if max(same) == (9, 0) else dotted(max(same))
    return tuple(codes[chip] for chip in sorted(codes)), (dotted(oldest),)


def dotted(chip: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in chip)


def arch_options(codes: tuple[str, ...], ptx: tuple[str, ...]) -> list[str]:
    """nvcc's options for machine code of some chips and PTX of some."""
    options = []
    for code in dict.fromkeys((*codes, *ptx)):
        bare = code.replace(".", "")
        # Both from one pass of the compiler, which two options would run twice.
        kinds = [f"sm_{bare}"] * (code in codes) + [f"compute_{bare}"] * (code in ptx)
        options.append(f"-gencode=arch=compute_{bare},code=[{','.join(kinds)}]")
    return options


def host_compilers(environ: Mapping[str, str], cxx: str) -> list[str]:
    """What to try as nvcc's host compiler, in order; empty names nvcc's own choice. A named one is the only one."""
    if named := environ.get("CUDAHOSTCXX") or environ.get("NVCC_CCBIN"):
        return [named]
    # A name without a number is a link to one with a number.
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
    """What nvcc with this host compiler complains of in a kernel that it makes folder/probe.o of; empty if it can."""
    Path(folder, "probe.cu").write_text(PROBE)
    command = [nvcc, *host_options(host), "-std=c++20", "-O3", "-Xcompiler", "-fPIC", *archs]
    return ask([*command, "-c", "probe.cu", "-o", "probe.o"], folder).complaint


def runtime_libraries(nvcc: str, host: str, cxx: str, folder: str) -> tuple[str, ...]:
    """The linker's options for nvcc's static runtime, tried with folder/probe.o."""
    # nvcc names the folders of its libraries in what it would run, and nowhere else.
    options = [*host_options(host), "--dryrun", "-shared", "-cudart=static", "probe.o", "-o", "probe.so"]
    said = ask([nvcc, *options], folder)
    folders = re.search(r"^#\$ LIBRARIES=(.*)$", said.output, re.MULTILINE)
    if folders is None:
        raise NoCudaError(
            f"{nvcc} does not say where its libraries are: {said.complaint or '--dryrun names none'}"
        )
    libraries = (*shlex.split(folders[1]), "-lcudart_static", "-lrt", "-lpthread", "-ldl")
    link = [cxx, "-shared", "-Wl,--no-undefined", "probe.o", *libraries, "-o", "probe.so"]
    if complaint := ask(link, folder).complaint:
        raise NoCudaError(
            f"{cxx} cannot link what {nvcc} compiles: {complaint}; install this toolkit's static runtime "
            f"(libcudart_static.a), or name another nvcc's folder ({OTHER_HOME})"
        )
    return libraries
