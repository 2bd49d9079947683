"""A library that does not fit this machine is refused, and each time the reason and the remedy are told."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megalite.errors import ConfigError
from megalite.ops import extension
from megalite.ops.extension import Built
from megalite.selftest.decide import choose_kernels, used_operators

FITTING = Built(
    library=True,
    said="built",
    left_out={"CUDA": "MEGALITE_CUDA=0"},
    nvcc="12.8.93",
    stable_abi="2.11",
    machine=extension.platform.machine(),
    cpu="x86-64-v3",
    cxx="g++ 12.2.0",
    sources=extension.sources_digest(),
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"library": False, "left_out": {"all": "no C++ compiler"}},
            "no C++ compiler; build it: python setup.py",
        ),
        ({"machine": "riscv64"}, "it was built for riscv64, this is"),
        (
            {"cpu": "x86-64-v9", "cpu_flags": ("avx", "avx9")},
            "it was built for x86-64-v9 processors, this one lacks avx9",
        ),
        ({"stable_abi": "9.1"}, "it needs torch 9.1 or newer, this is"),
        ({"sources": "0"}, "it was built from other sources than those in csrc/; build it"),
    ],
    ids=["nothing built", "machine", "processor", "torch", "sources"],
)
def test_a_library_that_does_not_fit_is_refused(change: dict, said: str) -> None:
    assert extension.misfit(FITTING) == ""
    assert said in extension.misfit(replace(FITTING, **change))


def test_an_install_that_was_never_built_says_so() -> None:
    assert extension.misfit(Built()) == f"megalite was installed without being built; {extension.REBUILD}"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(extension, "load", lambda: "")
    monkeypatch.setattr(extension, "built", lambda: FITTING)
    yield monkeypatch


IN_A_CHECKOUT = "build it: python setup.py build_ext --inplace"


@pytest.mark.parametrize(
    ("archs", "chip", "driver", "why"),
    [
        ("", (9, 0), (13, 0), "the library has no CUDA kernels: MEGALITE_CUDA=0; build it"),
        # Machine code: later chips of a generation, with a letter f too; with a letter a that chip alone.
        ("8.0 9.0a", (8, 0), (12, 0), ""),
        ("8.0 9.0a", (8, 9), (12, 0), ""),
        ("8.0 9.0a", (9, 0), (12, 8), ""),
        ("10.0f", (10, 3), (13, 0), ""),
        (
            "8.0",
            (9, 0),
            (13, 0),
            f'for chips 8.0, this one is 9.0; set MEGALITE_ARCHS="9.0a" and {IN_A_CHECKOUT}',
        ),
        ("8.6", (8, 0), (13, 0), 'for chips 8.6, this one is 8.0; set MEGALITE_ARCHS="8.0" and build it'),
        (
            "10.0a",
            (10, 3),
            (13, 0),
            'for chips 10.0a, this one is 10.3; set MEGALITE_ARCHS="10.3" and build it',
        ),
        ("10.0f", (12, 0), (13, 0), "for chips 10.0f, this one is 12.0"),
        # PTX: the same and later chips, by a driver for nvcc's version.
        ("8.0 9.0a +8.0", (12, 0), (12, 8), ""),
        ("8.0 9.0a +8.0", (9, 0), (12, 4), ""),
        ("8.0 +8.0", (9, 0), (13, 0), ""),
        (
            "8.0 9.0a +8.0",
            (10, 0),
            (12, 4),
            "it has no machine code for chip 10.0, and its PTX, of nvcc 12.8, needs a driver for CUDA 12.8 or newer, "
            'this driver is for CUDA 12.4; update the driver, or set MEGALITE_ARCHS="10.0" and build it',
        ),
        ("12.0 +12.0", (10, 0), (13, 0), "for chips 12.0, 12.0 and newer, this one is 10.0"),
        (
            "8.0 9.0a +8.0",
            (7, 5),
            (13, 0),
            "for chips 8.0, 9.0a, 8.0 and newer, this one is 7.5; there are none for chips older than 8.0",
        ),
        # The runtime: a driver for nvcc's major version.
        (
            "8.0 9.0a",
            (8, 0),
            (11, 8),
            "its CUDA 12.8 runtime needs a driver for CUDA 12.0 or newer, this driver is for CUDA 11.8; "
            "update the driver, or set CUDA_HOME to a toolkit of CUDA 11 and build it",
        ),
        ("8.0 9.0a +8.0", (12, 0), None, ""),
    ],
)
def test_cuda_kernels_are_for_some_chips_and_drivers(
    archs: str, chip: tuple[int, int], driver: tuple[int, int] | None, why: str
) -> None:
    codes = tuple(each for each in archs.split() if each[0] != "+")
    ptx = tuple(each[1:] for each in archs.split() if each[0] == "+")
    said = extension.runs_on_chip(replace(FITTING, archs=codes, ptx=ptx), chip, driver)
    assert why in said and bool(why) == bool(said), said


def test_every_gpu_that_torch_sees_has_to_run_them(loaded: pytest.MonkeyPatch) -> None:
    chips = [(8, 0), (7, 5)]
    loaded.setattr(extension, "built", lambda: replace(FITTING, archs=("8.0",)))
    loaded.setattr(extension, "driver_cuda_version", lambda: (13, 0))
    loaded.setattr(torch.cuda, "is_available", lambda: True)
    loaded.setattr(torch.cuda, "device_count", lambda: len(chips))
    loaded.setattr(torch.cuda, "get_device_capability", lambda index: chips[index])
    assert extension.why_not("cuda").startswith("GPU 1: its CUDA kernels are for chips 8.0, this one is 7.5")
    chips.pop()
    assert extension.why_not("cuda") == "" and extension.available("cuda")
    loaded.setattr(extension, "driver_cuda_version", lambda: (11, 8))
    assert extension.why_not("cuda").startswith("GPU 0: its CUDA 12.8 runtime needs a driver")
    loaded.setattr(torch.version, "hip", "6.4.2")
    assert (
        extension.why_not("cuda") == "its kernels for GPUs are built for CUDA, this torch is for ROCm 6.4.2"
    )


def test_the_drivers_version_is_asked_of_the_driver(loaded: pytest.MonkeyPatch) -> None:
    answers = {"code": 0, "version": 12080}

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, to: object) -> int:
            to._obj.value = answers["version"]  # type: ignore[attr-defined]
            return answers["code"]

    loaded.setattr(extension.ctypes, "CDLL", Driver)
    assert extension.driver_cuda_version() == (12, 8)
    answers["version"] = 13000
    assert extension.driver_cuda_version() == (13, 0)
    answers["code"] = 3
    assert extension.driver_cuda_version() is None
    loaded.setattr(extension.ctypes, "CDLL", missing)
    assert extension.driver_cuda_version() is None


def test_a_torch_for_rocm_has_none(loaded: pytest.MonkeyPatch) -> None:
    loaded.setattr(extension, "built", lambda: replace(FITTING, archs=("8.0",)))
    loaded.setattr(torch.cuda, "is_available", lambda: True)
    loaded.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    loaded.setattr(torch.version, "hip", "6.4.43482")
    assert extension.why_not("cpu") == ""
    assert (
        extension.why_not("cuda")
        == "its kernels for GPUs are built for CUDA, this torch is for ROCm 6.4.43482"
    )


def test_other_devices_have_none(loaded: pytest.MonkeyPatch) -> None:
    assert extension.why_not("cpu") == ""
    assert extension.why_not("xpu") == "there are none for devices of type xpu"


def test_what_a_run_asks_for_is_what_it_gets_or_an_error(loaded: pytest.MonkeyPatch) -> None:
    assert choose_kernels("reference", "cpu").name == "reference"
    assert str(choose_kernels("auto", "cpu")) == "fused (compiled for x86-64-v3 by g++ 12.2.0)"
    assert choose_kernels("fused", "cpu").name == "fused"
    loaded.setattr(extension, "load", lambda: "no compiler; build it: now")
    assert (
        str(choose_kernels("auto", "cpu"))
        == "reference (no compiled operators here: no compiler; build it: now)"
    )
    with pytest.raises(ConfigError) as raised:
        choose_kernels("fused", "cpu")
    assert 'model.kernels: "fused": the compiled operators cannot run here: no compiler; build it' in str(
        raised.value
    )
    assert used_operators("cpu")["adamw"] == "torch's fused AdamW"
