"""setup_cuda.py takes an nvcc, a host compiler and chips that work together, or says which of them do not.

Every nvcc here is a script that answers as one of some version does; two tests ask the real one.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import setup_cuda
from setup_cuda import NoCudaError, choose_archs, find_toolkit, parse_archs

from tests.support.emulated_cuda import EMULATOR, SOURCES, _source
from tests.support.jobs import running
from tests.support.waiting import soon, wait_until

HAS_COMPILER, HAS_NVCC = (any(map(shutil.which, names)) for names in (("g++",), ("nvcc",)))
WITHOUT_NVCC = "LOUD: nvcc is not in PATH, so it was not asked"
pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
OF_12_0 = ("50", "60", "70", "75", "80", "86", "89", "90")
OF_13_0 = ("75", "80", "86", "89", "90", "100", "103", "120", "121")
REFUSAL = "host_config.h:132:2: error: #error -- unsupported GNU version! gcc versions later than 12 are not supported!"
UNLINKABLE = "echo 'void missing(); void calls() { missing(); }' | g++ -c -fPIC -x c++ - -o probe.o"
SCRIPT = """#!{shell}
case "$*" in
*--version*) {version} ;;
*--list-gpu-code*) {codes} ;;
*--dryrun*) echo '#$ LIBRARIES=  "-L{libraries}"' >&2 ;;
*)
  case "$*" in {refused}) echo '{refusal}' >&2; exit 1 ;; esac
  {compiles} ;;
esac
"""


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, the whole PATH, with the tools that a compiler needs; no GPU, nvcc or toolkit is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("g++", "as", "ld", "ar", "sleep"):
        (folder / name).symlink_to(shutil.which(name) or "/nowhere")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(setup_cuda, "TOOLKITS", tmp_path / "toolkits")
    return folder


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def _nvcc(
    path: Path,
    version: str = "12.0.140",
    codes: Sequence[str] = OF_12_0,
    refused: str = "nothing",
    compiles: str = "g++ -c -x c++ /dev/null -o probe.o",
    runtime: bool = True,
) -> Path:
    """Write an nvcc that refuses commands matching `refused`, and whose toolkit may lack the static runtime."""
    libraries = path.parent.parent / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    if runtime:
        subprocess.run(["ar", "rcs", str(libraries / "libcudart_static.a")], check=True)
    said = f"echo 'Cuda compilation tools, release {version[:4]}, V{version}'"
    listed = "; ".join(f"echo sm_{code}" for code in codes)
    text = SCRIPT.format(
        shell=shutil.which("sh", path="/bin:/usr/bin"),
        version=said,
        codes=listed,
        libraries=libraries,
        refused=refused,
        refusal=REFUSAL,
        compiles=compiles,
    )
    return _script(path, text)


def test_the_c_plus_plus_compiler_is_nvccs_host_where_it_may_be(bin: Path) -> None:
    nvcc = _nvcc(bin / "nvcc")
    cxx = shutil.which("g++") or ""
    found = find_toolkit({}, cxx, "")
    assert (found.nvcc, found.version, found.host) == (str(nvcc), "12.0.140", cxx)
    assert (found.codes, found.ptx) == (("8.0", "9.0a"), ("8.0",))
    assert f"-L{bin.parent}/lib" in found.libraries


def test_of_a_refused_compiler_nvccs_own_or_another_takes_the_place(bin: Path) -> None:
    cxx = shutil.which("g++") or ""
    _nvcc(bin / "nvcc", refused="*-ccbin*g++*")
    assert find_toolkit({}, cxx, "").host == ""
    _script(bin / "g++-11", f'#!/bin/sh\nexec {os.path.realpath(cxx)} "$@"\n')
    _nvcc(bin / "nvcc", refused="-std*|*-ccbin*bin/g++\\ *")
    assert find_toolkit({}, cxx, "").host == str(bin / "g++-11")


def test_a_named_host_compiler_is_the_only_one(bin: Path) -> None:
    _nvcc(bin / "nvcc", refused="*-ccbin*g++-11*")
    cxx = shutil.which("g++") or ""
    assert find_toolkit({"NVCC_CCBIN": "g++"}, cxx, "").host == "g++"
    for name in ("CUDAHOSTCXX", "NVCC_CCBIN"):
        with pytest.raises(
            NoCudaError, match=r"does not work with g\+\+-11: .*unsupported GNU version! [^;]*; install"
        ):
            find_toolkit({name: "g++-11"}, cxx, "")


def test_an_nvcc_that_refuses_every_compiler_is_none(bin: Path) -> None:
    nvcc = _nvcc(bin / "nvcc", refused="*")
    (bin / "g++-12").symlink_to(os.path.realpath(bin / "g++"))  # the same again
    for name in ("g++-13", "clang++"):
        (bin / name).symlink_to("/bin/true")
    with pytest.raises(NoCudaError) as raised:
        find_toolkit({}, shutil.which("g++") or "", "")
    assert str(raised.value) == (
        f"{nvcc} 12.0.140 does not work with g++: {REFUSAL}; nor with its own choice, g++-13; "
        "install a host compiler that this nvcc takes and name it (CUDAHOSTCXX=g++-12), or name another nvcc's "
        "folder (CUDA_HOME=/usr/local/cuda-12.8)"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compiles": "kill -SEGV $$"}, "does not work with g++: killed by SIGSEGV"),
        ({"compiles": "exit 3"}, "does not work with g++: exit code 3, no reason given"),
        (
            {"compiles": UNLINKABLE},
            "g++ cannot link what .* compiles: .*undefined reference to .?missing.*; install",
        ),
        ({"runtime": False}, "g++ cannot link what .* compiles: .*cannot find -lcudart_static.*; install"),
        ({"version": "11.8.89"}, "nvcc 11.8.89 is older than 12.0"),
        ({"version": ""}, "does not print its version"),
        ({"codes": ()}, "does not list its architectures"),
    ],
    ids=[
        "crashes",
        "fails without a word",
        "an object that does not link",
        "no static runtime",
        "old",
        "no version",
        "no list",
    ],
)
def test_an_nvcc_that_does_not_work_is_none(bin: Path, change: dict, said: str) -> None:
    _nvcc(bin / "nvcc", **change)
    with pytest.raises(NoCudaError, match=said.replace("+", r"\+")):
        find_toolkit({}, shutil.which("g++") or "", "")


def test_an_nvcc_that_hangs_is_ended_with_what_it_started(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_cuda, "LIMIT", 0.5)
    _nvcc(bin / "nvcc", compiles=f"sleep 600 & echo $! >{bin}/started; wait")
    began = time.monotonic()
    with pytest.raises(NoCudaError, match=r"does not work with g\+\+: no answer within 120 s; install"):
        find_toolkit({}, shutil.which("g++") or "", "")
    started = int((bin / "started").read_text())
    assert time.monotonic() - began < soon(), "the build waited for it"
    wait_until(lambda: not running([started]), "the compiler that nvcc started still runs", soon())


def test_the_nvcc_is_one_that_needs_no_newer_driver_than_torch(bin: Path, tmp_path: Path) -> None:
    cxx = shutil.which("g++") or ""
    toolkits = tmp_path / "toolkits"
    newer = str(_nvcc(bin / "nvcc", "13.0.88", OF_13_0))
    assert find_toolkit({}, cxx, "12.8").nvcc == newer, "where there is no other"
    older = str(_nvcc(toolkits / "cuda-12.4" / "bin" / "nvcc", "12.4.131"))
    old = str(_nvcc(toolkits / "cuda-12.10" / "bin" / "nvcc", "12.10.1"))
    assert find_toolkit({}, cxx, "12.8").nvcc == old
    assert {find_toolkit({}, cxx, cuda).nvcc for cuda in ("13.2", "14.0", "")} == {newer}
    assert find_toolkit({"CUDA_HOME": str(toolkits / "cuda-12.4")}, cxx, "13.0").nvcc == older
    with pytest.raises(NoCudaError, match=r"no nvcc in CUDA_HOME \(/nowhere\)"):
        find_toolkit({"CUDA_HOME": "/nowhere"}, cxx, "")


def test_where_one_nvcc_does_not_work_another_may(bin: Path, tmp_path: Path) -> None:
    cxx = shutil.which("g++") or ""
    _nvcc(bin / "nvcc", "12.0.140", refused="*")
    other = _nvcc(tmp_path / "toolkits" / "cuda-12.8" / "bin" / "nvcc", "12.8.93", OF_13_0)
    assert find_toolkit({}, cxx, "12.8").nvcc == str(other)
    with pytest.raises(NoCudaError, match=r"bin/nvcc 12.0.140 does not work"):
        find_toolkit({"CUDA_HOME": str(tmp_path)}, cxx, "12.8")
    _nvcc(bin / "nvcc", "12.0.140")
    assert find_toolkit({"MEGALITE_ARCHS": "8.0;12.0"}, cxx, "12.8").nvcc == str(other)


@pytest.mark.parametrize(
    ("codes", "visible", "chosen"),
    [
        (OF_13_0, "", "8.0 9.0a"),
        (OF_13_0, "8.0\n8.6\n8.9", "8.0"),
        (OF_13_0, "9.0\n9.0", "8.0 9.0a"),
        (OF_13_0, "10.3\n12.0\n8.0", "8.0 10.3 12.0"),
        (OF_13_0, "10.1\n7.5\n[N/A]", "8.0 10.0"),
        (OF_12_0, "12.0", "8.0"),
        (("90", "100"), "9.0", "9.0"),
    ],
    ids=[
        "none",
        "of one generation",
        "Hopper",
        "several",
        "older than known",
        "unknown to nvcc",
        "a later nvcc",
    ],
)
def test_chips_are_the_oldest_and_the_visible_ones(
    bin: Path, codes: tuple, visible: str, chosen: str
) -> None:
    if visible:
        _script(bin / "nvidia-smi", f"#!/bin/sh\necho '{visible}'\n")
    known = {(int(code[:-1]), int(code[-1])) for code in codes}
    found, ptx = choose_archs(known, setup_cuda.visible_chips())
    assert " ".join(found) == chosen and ptx == (found[0],)


def test_a_broken_nvidia_smi_shows_no_chips(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_cuda, "LIMIT", 0.2)
    for does in ("echo 8.0; exit 9", "sleep 60", "echo NVIDIA-SMI has failed"):
        _script(bin / "nvidia-smi", f"#!/bin/sh\n{does}\n")
        assert setup_cuda.visible_chips() == set(), does


def test_a_list_of_chips_is_read() -> None:
    assert parse_archs(" auto ") is None
    assert parse_archs("8.0+PTX; 9.0a;12.0+PTX;8.0") == (("8.0", "9.0a", "12.0"), ("8.0", "12.0"))
    options = setup_cuda.arch_options(("8.0", "9.0a"), ("8.0",))
    assert options == [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        "-gencode=arch=compute_90a,code=[sm_90a]",
    ]


@pytest.mark.parametrize(
    ("archs", "said"),
    [
        ("8.0;hopper", "MEGALITE_ARCHS has 'hopper'; it is auto or a list like"),
        ("8.0;7.5", "MEGALITE_ARCHS has '7.5'; the kernels need 8.0 or newer"),
        ("9.0a+PTX", r"PTX of 9.0a runs on no later GPU; add \+PTX to .*: \"8.0\+PTX;9.0a\""),
        (
            "8.0;12.0",
            r"MEGALITE_ARCHS has '12.0', which .*nvcc 12.0.140 does not support; it supports 8.0, 8.6, 8.9, 9.0$",
        ),
    ],
)
def test_chips_that_cannot_be_are_refused(bin: Path, archs: str, said: str) -> None:
    _nvcc(bin / "nvcc")
    with pytest.raises(ValueError, match=said):
        find_toolkit({"MEGALITE_ARCHS": archs}, shutil.which("g++") or "", "")


@pytest.mark.skipif(not HAS_NVCC, reason=WITHOUT_NVCC)
def test_the_real_nvcc_works_with_the_compiler_and_refuses_one_of_the_future(tmp_path: Path) -> None:
    cxx = shutil.which("g++") or ""
    future = _script(tmp_path / "g++-99", f'#!/bin/sh\nexec {cxx} -U__GNUC__ -D__GNUC__=99 "$@"\n')
    [(nvcc, _), *_] = setup_cuda.find_compilers(os.environ, "")
    assert "unsupported GNU version" in setup_cuda.try_host(nvcc, str(future), [], str(tmp_path))
    # The compiler that links need not be supported by nvcc.
    archs = setup_cuda.arch_options(("8.0",), ("8.0",))
    assert setup_cuda.try_host(nvcc, cxx, archs, str(tmp_path)) == ""
    assert "-lcudart_static" in setup_cuda.runtime_libraries(nvcc, cxx, str(future), str(tmp_path))


def test_without_code_of_its_own_the_hopper_kernel_is_not_taken(tmp_path: Path) -> None:
    """On a 9.0 chip, like the emulator's, the kernel's body would be empty and leave the output unwritten."""
    _source("attention_hopper_64", tmp_path, "")
    (tmp_path / "asks.cpp").write_text(
        '#include "cuda/attention_hopper.cuh"\nextern "C" int taken() { return ml::takes_hopper(); }\n'
    )
    folders = [f"-I{folder}" for folder in (EMULATOR, tmp_path, SOURCES)]
    for define, taken in (("MEGALITE_WITH", 1), ("MEGALITE_WITHOUT_SM90A", 0)):
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-D{define}", *folders, "asks.cpp", "-o", define]
        subprocess.run(command, cwd=tmp_path, check=True)
        assert ctypes.CDLL(str(tmp_path / define)).taken() == taken, define


def test_nothing_is_asked_of_torch() -> None:
    """An isolated build may lack torch, and querying a GPU through torch would keep the GPU in use."""
    command = [sys.executable, "-c", "import setup_cuda, sys; print('torch' in sys.modules)"]
    root = Path(setup_cuda.__file__).parent
    assert subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout == "False\n"
