"""DeepSpeed's compiled operators: built once, by one process, and what is said where that fails. Compiles nothing."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
from deepspeed.runtime.zero.partition_parameters import Init

from megalite.errors import ConfigError
from megalite.train.optimizer import deepspeed_ops
from megalite.train.optimizer.deepspeed_ops import build_operators, operators, require_precision
from tests.support import reported_faults as faults
from tests.support.museum import exhibit

CONFIG = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the operator's build folder with the lock of a killed build."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed_ops, "_missing_programs", lambda: "")
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    (folder / "lock").touch()
    return folder


def compiler(monkeypatch: pytest.MonkeyPatch, load: Callable[[], None]) -> None:
    monkeypatch.setattr(CPUAdamBuilder, "load", lambda self, **_: load())


@exhibit(
    "Megatron-LM#82",
    also=("Megatron-LM#1050", "Megatron-DeepSpeed#93", "gpt-neox#1334"),
    subject="settings",
    there="a build that was killed left its lock, and every later start waited for it for ever",
    here="a lock that nobody holds is removed, and the operator is built",
    fault=faults.STALE_LOCKS_STAY,
)
def test_it_is_built_once_and_no_stale_lock_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def load() -> None:
        assert not (folder / "lock").exists()
        (folder / "cpu_adam.so").touch(exist_ok=False)

    compiler(monkeypatch, load)
    build_operators(operators(CONFIG, native=True), said.append)
    build_operators(operators(CONFIG, native=True), said.append)
    [line] = said
    assert line.startswith(f"deepspeed.native_optimizer: compiling cpu_adam in {folder}, once")


def fail() -> None:
    raise RuntimeError("Error building extension 'cpu_adam': no such header")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (fail, "Error building extension 'cpu_adam': no such header"),
        (die, "the compiling process was killed"),
    ],
)
def test_a_build_that_fails_names_the_setting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[], None], said: str
) -> None:
    compiler(monkeypatch, load)
    with pytest.raises(ConfigError) as caught:
        build_operators(operators(CONFIG, native=True), lambda _: None)
    [problem] = caught.value.problems
    assert problem.key == "deepspeed.native_optimizer" and said in problem.message
    assert problem.remedy == "see what the compiler says, or set it to false"


def test_missing_programs_are_named_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension

    def refuse() -> Any:
        raise AssertionError("compiled")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    compiler(monkeypatch, refuse)
    with pytest.raises(
        ConfigError, match="ninja and no-such-compiler is missing; install it, or set it to f"
    ):
        build_operators(operators(CONFIG, native=True), lambda _: None)


def test_offload_to_disk_names_the_library_that_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "pin_memory").mkdir()
    (folder.parent / "pin_memory" / "pin_memory.so").touch()
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self: False)
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    with pytest.raises(ConfigError) as caught:
        build_operators(operators(config, native=False), lambda _: None)
    [problem] = caught.value.problems
    assert str(problem) == (
        "deepspeed.zero_optimization.offload_param.device: needs async_io: it is compiled here, and the library "
        'libaio is missing; install it with its headers (libaio-dev, libaio-devel), or use "cpu"'
    )


def test_weights_on_disk_are_refused_where_deepspeed_would_round_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    require_precision("bf16", config)
    with pytest.raises(ConfigError) as caught:
        require_precision("fp32", config)
    [problem] = caught.value.problems
    assert str(problem) == (
        'deepspeed.zero_optimization.offload_param.device: "nvme" with training.precision = "fp32" needs a GPU: '
        'DeepSpeed would write bf16 on this CPU; use "cpu", or training.precision "bf16"'
    )
    # The reason: once DeepSpeed takes the type that it is told, this is to be allowed.
    told = SimpleNamespace()
    Init._set_dtype(told, None, torch.float32)
    assert told.dtype == torch.bfloat16
