"""setup.py builds what the machine can, says so in one line, and compiles again only what changed.

The library that these tests look at is the one the set-up built; what they build themselves is a few lines.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import setup_cuda
import setuptools
import torch
from setuptools.errors import SetupError

import build_backend
from megalite.ops import extension
from megalite.version import __version__

ROOT = Path(__file__).parents[2]
RESOURCES = Path(__file__).parent / "kernel_resources.json"
FOR_THE_CPU_ALONE = (
    "megalite::cross_entropy_losses_",
    "megalite::decode_attention",
    "megalite::few_rows_linear",
)
HAS_COMPILER, HAS_NVCC = (any(map(shutil.which, names)) for names in (("g++", "c++"), ("nvcc",)))
WITHOUT_NVCC = "LOUD: nvcc is not in PATH, so no CUDA kernel was compiled and none of this was checked"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py, without its call of setup()."""
    spec = importlib.util.spec_from_file_location("megalite_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(setuptools, "setup"), mock.patch.dict(sys.modules, megalite_setup=module):
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def small(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources of two lines, in place of csrc."""
    csrc = tmp_path / "csrc"
    for folder in ("core", "cpu", "bind", "cuda"):
        (csrc / folder).mkdir(parents=True)
    (csrc / "core" / "one.h").write_text("constexpr int kOne = 1;\n")
    (csrc / "cpu" / "one.cpp").write_text('#include "core/one.h"\nextern "C" int one() { return kOne; }\n')
    (csrc / "bind" / "two.cpp").write_text('extern "C" int two() { return 2; }\n')
    monkeypatch.setattr(build, "CSRC", csrc)
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "objects")
    return csrc


def _without(name: str, **environ: str) -> dict[str, str]:
    """The environment without CUDA_HOME and CXX, PATH without the folders that hold `name`."""
    folders = [each for each in os.environ["PATH"].split(":") if not shutil.which(name, path=each)]
    kept = {key: value for key, value in os.environ.items() if key not in ("CUDA_HOME", "CXX")}
    return kept | {"PATH": ":".join(folders)} | environ


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_the_library_is_here_and_fits_wherever_there_is_a_compiler() -> None:
    assert extension.load() == "" and extension.available("cpu"), extension.load()


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_every_operator_has_a_kernel_for_the_cpu_and_where_nvcc_is_for_cuda() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("megalite::")]
    names = [name for name in names if not has(name, "CompositeExplicitAutograd")]  # those without tensors
    assert names
    keys = ["CPU", "CUDA"] if extension.built().archs else ["CPU"]
    without = {(name, key) for name in names for key in keys if not has(name, key)}
    assert without == {(name, key) for name in FOR_THE_CPU_ALONE for key in keys if key == "CUDA"}


@pytest.mark.skipif(not HAS_NVCC, reason=WITHOUT_NVCC)
def test_the_kernels_are_compiled_for_the_chips_that_the_build_chose() -> None:
    built = extension.built()
    [(nvcc, _), *_] = setup_cuda.find_compilers(os.environ, torch.version.cuda or "")
    chosen = setup_cuda.choose_archs(setup_cuda.known_chips(nvcc), setup_cuda.visible_chips())
    assert (built.archs, built.ptx) == chosen and built.nvcc, built.said
    sources = {f"cuda/{each.name}" for each in (extension.SOURCES / "cuda").glob("*.cu")}
    assert built.kernels.keys() == sources
    every = {f"sm_{arch.replace('.', '')}" for arch in built.archs}
    for source, kernels in built.kernels.items():
        hopper = {"sm_90a"} if "hopper" in source and "9.0a" in built.archs else every
        assert {kernel["arch"] for kernel in kernels} == hopper, source


def _function(mangled: str) -> str:
    """The name of a kernel, without its namespaces and template arguments."""
    rest, name = re.sub(r"^_ZN?", "", mangled), ""
    while length := re.match(r"\d+", rest):
        begin = length.end()
        name, rest = rest[begin : begin + int(length[0])], rest[begin + int(length[0]) :]
    return name


@pytest.mark.skipif(not HAS_NVCC, reason=WITHOUT_NVCC)
def test_no_kernel_takes_more_than_the_table_allows() -> None:
    """The table has registers a thread, the most over all types and chips; stack and spills where there are any."""
    table = json.loads(RESOURCES.read_text())
    worst: dict[str, dict[str, int]] = {}
    for source, kernels in extension.built().kernels.items():
        for kernel in kernels:
            seen = worst.setdefault(f"{Path(source).name}: {_function(kernel['kernel'])}", {})
            for what in ("registers", "stack", "spilled"):
                if kernel[what] or what == "registers":
                    seen[what] = max(seen.get(what, 0), kernel[what])
    complaints = [
        f"{name} takes {seen}, the table has {table.get(name)}"
        for name, seen in worst.items()
        if any(value > table.get(name, {}).get(what, 0) for what, value in seen.items())
    ]
    assert not complaints, "\n".join([*complaints, f"all: {json.dumps(dict(sorted(worst.items())))}"])
    assert table.keys() <= worst.keys(), "the table names kernels that are no more"


def test_the_function_of_a_kernel_is_read_from_its_mangled_name() -> None:
    assert _function("_ZN2ml12norm_forwardIfLi4EEEvPKT_") == "norm_forward"
    assert _function("_Z5scalePf") == "scale"


def test_what_ptxas_says_is_read(build: ModuleType) -> None:
    said = """ptxas info    : Compiling entry function '_Z5scalePf' for 'sm_80'
ptxas info    : Function properties for _Z5scalePf
    16 bytes stack frame, 48 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 512 bytes smem, 428 bytes cmem[0]"""
    assert build.kernels_of(said) == [
        {"kernel": "_Z5scalePf", "arch": "sm_80", "registers": 128, "stack": 16, "spilled": 112}
    ]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_only_what_changed_is_compiled_again(build: ModuleType, small: Path, tmp_path: Path) -> None:
    tools = build.find_tools({"MEGALITE_CUDA": "0"})
    assert "; 2 of 2 files compiled" in build.build(tools, tmp_path / "ops")
    assert "; 0 of 2 files compiled" in build.build(tools, tmp_path / "ops")
    (small / "core" / "one.h").write_text("constexpr int kOne = 11;\n")
    said = build.build(tools, tmp_path / "ops")
    assert "; 1 of 2 files compiled" in said and "no CUDA: MEGALITE_CUDA=0" in said
    record = json.loads((tmp_path / "ops" / build.RECORD).read_text())
    # Every run prints this message about its kernels, so compile times are left out.
    assert record["said"] == said.partition("; 1 of 2")[0]
    assert record["left_out"] == {"CUDA": "MEGALITE_CUDA=0"} and not record["archs"]
    assert record["sources"] == extension.sources_digest(small)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_the_build_shows_how_far_it_is(
    build: ModuleType,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "SECONDS_A_LINE", 0)
    monkeypatch.setenv("MAX_JOBS", "1")
    build.build(build.find_tools({"MEGALITE_CUDA": "0"}), tmp_path / "ops")
    first, *progress = capfd.readouterr().out.splitlines()
    assert first == "megalite: compiling 2 files, 0 of them CUDA kernels, 1 at once: less than a minute"
    assert [line.rpartition(" after ")[0] for line in progress] == [
        "megalite: 1 of 2 files compiled",
        "megalite: 2 of 2 files compiled",
    ]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_a_source_that_does_not_compile_ends_the_build(
    build: ModuleType, small: Path, tmp_path: Path
) -> None:
    (small / "cpu" / "one.cpp").write_text("int one() { return missing; }\n")
    with pytest.raises(SetupError, match=r"missing.* was not declared"):
        build.build(build.find_tools({"MEGALITE_CUDA": "0"}), tmp_path / "ops")


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_without_nvcc_cuda_is_left_out_or_an_error(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", _without("nvcc")["PATH"])
    monkeypatch.setattr(setup_cuda, "TOOLKITS", Path("/nowhere"))
    if shutil.which("g++") is None:
        pytest.skip("g++ and nvcc lie in one folder")
    why = build.find_tools({"MEGALITE_CUDA": "try"}).why
    assert why == {"CUDA": "no nvcc in PATH or /nowhere/cuda/bin, and no CUDA_HOME"}
    with pytest.raises(SetupError, match="MEGALITE_CUDA=1, but: no nvcc"):
        build.find_tools({"MEGALITE_CUDA": "1"})
    with pytest.raises(SetupError, match="no nvcc in CUDA_HOME"):
        build.find_tools({"MEGALITE_CUDA": "1", "CUDA_HOME": "/nowhere"})


def _refusing(folder: Path) -> setup_cuda.Toolkit:
    """A toolkit whose nvcc compiles nothing."""
    nvcc = folder / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'warning: slow'; echo 'three.cu(1): error: no kernel' >&2; exit 2\n")
    nvcc.chmod(0o755)
    return setup_cuda.Toolkit(str(nvcc), "12.4.131", "", "", ("8.0", "9.0a"), ("8.0",), ("-ldl",))


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_a_kernel_that_does_not_compile_leaves_cuda_out_or_is_an_error(
    build: ModuleType, small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (small / "cuda" / "three.cu").write_text("not C++\n")
    plain = build.find_tools({"MEGALITE_CUDA": "0"})
    tools = replace(plain, cuda=_refusing(tmp_path), cuda_wanted="auto", why={})
    assert tools.chips == "CUDA 8.0, 9.0a, PTX 8.0 (nvcc 12.4.131 with its own host compiler)"
    line = build.build(tools, tmp_path / "ops")
    reason = "cuda/three.cu does not compile: three.cu(1): error: no kernel"
    assert f"and no CUDA: {reason}; " in line
    assert "MEGALITE_CUDA=0 builds without CUDA kernels" in capfd.readouterr().err
    record = json.loads((tmp_path / "ops" / build.RECORD).read_text())
    assert record["left_out"] == {"CUDA": reason} and not (record["archs"] or record["ptx"] or record["nvcc"])
    two = next(each for each in build.objects_of(plain) if each.source.name == "two.cpp")
    assert two.is_current(), "the operators must not be bound to kernels that are not there"
    with pytest.raises(SetupError, match=r"error: no kernel"):
        build.build(replace(tools, cuda_wanted="1"), tmp_path / "ops")


def test_the_kernel_for_hopper_is_called_where_its_machine_code_is(build: ModuleType, tmp_path: Path) -> None:
    def options(codes: tuple[str, ...], name: str) -> str:
        toolkit = replace(_refusing(tmp_path), codes=codes)
        found = [each for each in build.kernel_objects(toolkit) if each.source.stem == name]
        return " ".join(found[0].command)

    hopper, forward = (options(("8.0", "9.0a"), f"attention_{kind}_128") for kind in ("hopper", "forward"))
    assert (
        "sm_80" not in hopper and "sm_90a" in hopper and "sm_80,compute_80" in forward and "sm_90a" in forward
    )
    assert "-DMEGALITE_WITHOUT_SM90A" not in hopper + forward
    for codes in (("8.0",), ("8.0", "9.0")):
        assert "-DMEGALITE_WITHOUT_SM90A" in options(codes, "attention_hopper_128")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (
            "__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
            "2.13.0+cu128 12.8 ",
        ),
        (
            "__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4.2'\n",
            "2.13.0  6.4.2",
        ),
        ("__version__ = '2.13.0+cpu'\ncuda = None\n", "2.13.0+cpu  "),
        (
            "__version__ = '2.9.1'\ncuda = '12.8'\n",
            "torch 2.9.1 is older than 2.11; install torch 2.11 or newer",
        ),
        ("", "has no headers of the stable ABI; install torch 2.11 or newer"),
    ],
    ids=["CUDA", "ROCm", "CPU", "old", "broken"],
)
def test_what_torch_is_built_for_is_read_from_its_files(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, found: str
) -> None:
    header = tmp_path / "include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    (tmp_path / "version.py").write_text(written)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: spec)
    torch_here = build.find_torch()
    said = f"{torch_here.version} {torch_here.cuda} {torch_here.hip}"
    assert found in (torch_here.why or said)
    if HAS_COMPILER and torch_here.folder and not torch_here.cuda:
        why = (
            "torch is built for ROCm 6.4.2, whose GPUs run no CUDA kernels"
            if torch_here.hip
            else "torch 2.13.0+cpu is for CPUs (MEGALITE_CUDA=1 builds them anyway)"
        )
        assert build.find_tools({}).why == {"CUDA": why}


def test_a_toolkit_newer_than_torchs_says_which_driver_it_needs(build: ModuleType, tmp_path: Path) -> None:
    newer = replace(_refusing(tmp_path), version="13.0.88", host="/usr/bin/g++-12")
    tools = build.Tools(
        "/usr/bin/g++", "14.2.0", "", build.Torch(tmp_path, "2.13.0", "12.8"), newer, "auto", {}
    )
    said = "(nvcc 13.0.88 with g++-12; needs a driver for CUDA 13.0, torch one for 12.0)"
    assert tools.chips == f"CUDA 8.0, 9.0a, PTX 8.0 {said}"
    assert "driver" not in replace(tools, torch=build.Torch(tmp_path, "2.13.0", "13.2")).chips


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"MEGALITE_CUDA": "yes"}, "MEGALITE_CUDA is 'yes'; it is 0, 1, try or auto"),
        ({"MEGALITE_OPERATORS": "yes"}, "MEGALITE_OPERATORS is 'yes'; it is 0, 1 or auto"),
        ({"MEGALITE_CPU": "x86-64-v5"}, "MEGALITE_CPU is 'x86-64-v5'; it is one of x86-64-v4, x86-64-v3"),
    ],
)
def test_a_setting_without_meaning_is_refused(build: ModuleType, environ: dict[str, str], said: str) -> None:
    with pytest.raises(SetupError, match=re.escape(said)):
        build.find_tools(environ)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"CXX": "/nowhere/g++"}, "cannot compile C++20 with OpenMP"),
        ({"torch": None}, "torch is not in the environment that builds"),
        ({"MEGALITE_OPERATORS": "0"}, "MEGALITE_OPERATORS=0"),
    ],
    ids=["compiler", "torch", "asked"],
)
def test_without_a_compiler_or_torch_it_is_pure_python(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict, said: str
) -> None:
    if "torch" in change:
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    (tmp_path / build.LIBRARY).write_text("of an earlier build")
    line = build.build(build.find_tools({key: value for key, value in change.items() if value}), tmp_path)
    assert line.startswith("megalite: pure Python, no compiled operators: ") and said in line
    record = json.loads((tmp_path / build.RECORD).read_text())
    assert not record["library"] and said in record["left_out"]["all"]
    assert not (tmp_path / build.LIBRARY).exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that a wheel is built from."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "build_backend.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("megalite", "examples", "launch"):
        ignored = shutil.ignore_patterns("__pycache__", "libmegalite.*", "runs")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    return source


def _wheel(source: Path, environ: dict[str, str], hook: str = "build_wheel") -> tuple[str, zipfile.ZipFile]:
    """What `pip wheel` calls, without pip; returns the name of the wheel and the wheel."""
    code = f"import build_backend, sys; build_backend.{hook}(sys.argv[1])"
    command = [sys.executable, "-c", code, "wheels"]
    done = subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = (source / "wheels").glob("*.whl")
    return wheel.name, zipfile.ZipFile(wheel)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_a_wheel_has_operators_and_a_platform_where_there_is_a_compiler(checkout: Path) -> None:
    for source in [*(checkout / "megalite/csrc").rglob("*.cpp"), *(checkout / "megalite/csrc").rglob("*.cu")]:
        source.unlink()
    (checkout / "megalite/csrc/cpu/one.cpp").write_text('extern "C" int one() { return 1; }\n')
    name, wheel = _wheel(checkout, dict(os.environ))
    assert name.endswith("-py3-none-linux_x86_64.whl") or "x86_64" not in os.uname().machine
    names = wheel.namelist()
    assert "megalite/ops/libmegalite.so" in names
    # The digest of the sources is compared where they are: a wheel has none of them.
    assert not any("csrc" in each for each in names)


def test_a_wheel_without_operators_fits_any_platform_and_says_so(checkout: Path, tmp_path: Path) -> None:
    name, wheel = _wheel(checkout, _without("c++", PATH=str(tmp_path / "empty")))
    assert name.endswith("-py3-none-any.whl")
    names = set(wheel.namelist())
    record = json.loads(wheel.read("megalite/ops/libmegalite.json"))
    assert record["said"] == "megalite: pure Python, no compiled operators: no C++ compiler (g++, c++ or CXX)"
    for script in (ROOT / "launch").iterdir():
        assert f"megalite/_share/launch/{script.name}" in names
    assert {"megalite/py.typed", "megalite/_share/examples/quickstart/run.toml"} <= names
    assert "megalite/_share/examples/setup.sh" not in names
    files = [path for suffix in ("py", "toml") for path in (ROOT / "megalite").rglob(f"*.{suffix}")]
    modules = {path.relative_to(ROOT).as_posix() for path in files}
    assert {each for each in modules - names if "/csrc/" not in each} == set()
    [metadata] = [wheel.read(each).decode() for each in names if each.endswith(".dist-info/METADATA")]
    for line in (
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
        "Description-Content-Type: text/markdown",
    ):
        assert line in metadata.splitlines()
    # The wheel installed: its examples are found beside the package.
    wheel.extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "megalite", "examples", "copied"]
    done = subprocess.run(command, cwd=tmp_path / "installed", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("examples/quickstart/run.toml", "launch/slurm.sbatch"):
        assert (tmp_path / "installed/copied" / name).read_bytes() == (ROOT / name).read_bytes()


def test_an_editable_install_is_found_beside_a_folder_of_the_same_name(
    checkout: Path, tmp_path: Path
) -> None:
    """`python -m megalite` from the folder that holds the clone: Python takes the clone for a namespace package."""
    _wheel(checkout, _without("c++", PATH=str(tmp_path / "empty")), hook="build_editable")
    [wheel] = (checkout / "wheels").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "parent" / "megalite" / "megalite").mkdir(parents=True)
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import megalite; print(megalite.__version__)"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path / "parent", env={}, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{__version__}\n", done.stderr


@pytest.mark.extended
def test_an_sdist_has_every_file_and_builds_a_wheel(tmp_path: Path) -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = {name for name in listing.stdout.splitlines() if (ROOT / name).is_file()}
    for name in tracked:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    code = "import build_backend; build_backend.build_sdist('.')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path / "source", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [archive] = (tmp_path / "source").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    assert {name for name in tracked if not (unpacked / name).is_file()} <= {".ci/run"}
    name, _ = _wheel(unpacked, _without("c++", PATH=str(tmp_path / "empty")))
    assert name.endswith("-py3-none-any.whl")


def test_pip_is_asked_for_torch_only_where_operators_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++")
    assert build_backend.torch_requirement() == ["torch>=2.13"]
    assert "torch>=2.13" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    monkeypatch.setenv("MEGALITE_OPERATORS", "0")
    assert build_backend.torch_requirement() == []
    monkeypatch.delenv("MEGALITE_OPERATORS")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert build_backend.torch_requirement() == []


def test_a_machine_without_a_compiler_installs_it_all_the_same(checkout: Path, tmp_path: Path) -> None:
    source = checkout
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(tmp_path / "built")]
    environ = _without("c++", PATH=str(tmp_path / "empty"))
    done = subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "megalite: pure Python, no compiled operators: no C++ compiler" in done.stdout
    record = json.loads((tmp_path / "built" / "megalite" / "ops" / "libmegalite.json").read_text())
    assert extension.misfit(extension.Built(**record)).startswith(
        "no C++ compiler (g++, c++ or CXX); build it"
    )
