"""A library that does not fit this machine is refused, and each time the reason and the remedy are told."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megalite.errors import ConfigError
from megalite.model.kernels import PARTS, choose_kernels, used_parts
from megalite.ops import extension
from megalite.ops.extension import Built

FITTING = Built(
    library=True,
    said="built",
    left_out={"CUDA": "MEGALITE_CUDA=0"},
    stable_abi="2.11",
    machine=extension.platform.machine(),
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


@pytest.mark.parametrize(
    ("archs", "chip", "why"),
    [
        ((), (9, 0), "the library has no CUDA kernels: MEGALITE_CUDA=0; build it"),
        (("8.0", "9.0a"), (8, 0), ""),
        (("8.0", "9.0a"), (8, 9), ""),
        (("8.0", "9.0a"), (9, 0), ""),
        (("8.0",), (9, 0), "its CUDA kernels are for chips 8.0, this one is 9.0; build it"),
        (("8.0", "9.0a"), (10, 0), "its CUDA kernels are for chips 8.0, 9.0a, this one is 10.0; build it"),
        (("8.6",), (8, 0), "its CUDA kernels are for chips 8.6, this one is 8.0; build it"),
    ],
)
def test_cuda_kernels_are_for_some_chips(
    loaded: pytest.MonkeyPatch, archs: tuple[str, ...], chip: tuple[int, int], why: str
) -> None:
    loaded.setattr(extension, "built", lambda: replace(FITTING, archs=archs))
    loaded.setattr(torch.cuda, "is_available", lambda: True)
    loaded.setattr(torch.cuda, "get_device_capability", lambda: chip)
    assert extension.why_not("cuda").startswith(why) and extension.available("cuda") == (not why)


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
    assert str(choose_kernels("auto", "cpu")) == "fused (built)"
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
    assert used_parts("cpu") == {name: part.reference for name, part in PARTS.items()}
