"""Requirements of DeepSpeed on the machine, checked before ranks wait for each other; its compiled operators."""

import fcntl
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder, PinMemoryBuilder
from torch.utils import cpp_extension

from megalite.config.sections.derived import offload_devices
from megalite.errors import ConfigError, Problem
from megalite.train.optimizer.rule import OptimizerParts
from megalite.train.optimizer.update import keep_average


def require_precision(precision: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError where DeepSpeed refuses the number type on this machine, as most CPUs' fp16.

    config: DeepSpeed's JSON. Files of weights have 16 bits on a CPU without fp16, whatever the model's type
    (`Init._set_dtype` in runtime/zero/partition_parameters.py).
    """
    accelerator = get_accelerator()
    # A GPU is not asked here: the question would start CUDA, which no fork survives.
    if accelerator.device_name() != "cpu" or accelerator.is_fp16_supported():
        return
    devices = offload_devices(config["zero_optimization"])
    if precision == "fp16":
        problem = Problem(
            "training.precision",
            '"fp16" with ZeRO needs a GPU: DeepSpeed refuses it on this CPU',
            'use "bf16" or "fp32", or leave [deepspeed] out',
        )
    elif devices.get("offload_param") == "nvme" and precision not in ("bf16", "auto"):
        problem = Problem(
            "deepspeed.zero_optimization.offload_param.device",
            f'"nvme" with training.precision = "{precision}" needs a GPU: DeepSpeed would write bf16 on this CPU',
            'use "cpu", or training.precision "bf16"',
        )
    else:
        return
    raise ConfigError([problem])


@dataclass(frozen=True)
class Operator:
    """Something of DeepSpeed's that is compiled where it runs.

    key: the setting that asks for it. otherwise: what to set instead.
    """

    builder: Any
    key: str
    otherwise: str

    @property
    def folder(self) -> Path:
        return Path(cpp_extension._get_build_directory(self.builder.name, False))

    def refused(self, message: str, remedy: str) -> ConfigError:
        message = f"needs {self.builder.name}: {message}"
        return ConfigError([Problem(self.key, message, f"{remedy}, or {self.otherwise}")])


def operators(config: Mapping[str, Any], *, native: bool) -> list[Operator]:
    """Return the operators that a run needs. config: DeepSpeed's JSON; native: its own AdamW updates the weights."""
    zero = config["zero_optimization"]
    to_disk = [key for key, device in offload_devices(zero).items() if device == "nvme"]
    needed = (
        [Operator(_adam_builder(zero), "deepspeed.native_optimizer", "set it to false")] if native else []
    )
    if to_disk:
        key = f"deepspeed.zero_optimization.{to_disk[0]}.device"
        needed += [Operator(builder(), key, 'use "cpu"') for builder in (PinMemoryBuilder, AsyncIOBuilder)]
    return needed


def build_operators(needed: Sequence[Operator], say: Callable[[str], None]) -> None:
    """Compile those that were not compiled before. Raises ConfigError when one cannot be.

    In a process of its own, since to find out what a GPU can do starts CUDA, which no fork survives.
    """
    for operator in needed:
        builder, folder = operator.builder, operator.folder
        if (folder / f"{builder.name}.so").exists():
            continue
        missing = _missing_programs()
        if missing:
            raise operator.refused(f"it is compiled here, and {missing} is missing", "install it")
        if isinstance(builder, AsyncIOBuilder) and not builder.is_compatible():
            message = "it is compiled here, and the library libaio is missing"
            raise operator.refused(message, "install it with its headers (libaio-dev, libaio-devel)")
        say(f"{operator.key}: compiling {builder.name} in {folder}, once; it takes a minute or more")
        if error := _built_apart(operator):
            raise operator.refused(f"it does not compile: {error}", "see what the compiler says")


def load_operators(needed: Sequence[Operator]) -> None:
    """Have them in this process, for DeepSpeed to find."""
    for operator in needed:
        with _alone(operator.folder):
            operator.builder.load(verbose=False)


def native_optimizer(config: Mapping[str, Any], parts: OptimizerParts) -> torch.optim.Optimizer:
    """Return DeepSpeed's own AdamW: on the CPU where its state lies there, else fused on the GPU."""
    settings = parts.settings.optimizer
    on_cpu = isinstance(_adam_builder(config["zero_optimization"]), CPUAdamBuilder)
    adam = DeepSpeedCPUAdam if on_cpu else FusedAdam
    optimizer: torch.optim.Optimizer = adam(parts.groups(), lr=0.0, betas=settings.betas, eps=settings.eps)
    keep_average(optimizer, parts.settings)
    return optimizer


def replay_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Bring what DeepSpeed's AdamW on the CPU hides from its state to its value after that many updates, to the bit.

    It multiplies the powers of the betas up in float32, step by step; of a step out of turn, as the first after a
    resume would be, it takes std::pow, whose last digits differ (IncrementStep in csrc/includes/cpu_adam.h).
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    nothing, group = torch.empty(0), optimizer.param_groups[0]
    for step in range(steps + 1):  # 0 sets both powers to 1, whatever was there
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, True, *[nothing] * 4
        )


def _adam_builder(zero: Mapping[str, Any]) -> Any:
    offloads = "offload_optimizer" in offload_devices(zero)
    on_cpu = offloads or get_accelerator().device_name() == "cpu"
    return CPUAdamBuilder() if on_cpu else FusedAdamBuilder()


def _missing_programs() -> str:
    compiler = cpp_extension.get_cxx_compiler()
    programs = {"ninja": cpp_extension.is_ninja_available(), compiler: shutil.which(compiler) is not None}
    return " and ".join(name for name, there in programs.items() if not there)


def _built_apart(operator: Operator) -> str:
    """Compile it in a process of its own; returns what went wrong."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_build, args=(operator, sender))
    process.start()
    sender.close()
    try:
        error = str(receiver.recv())
    except EOFError:
        error = "the compiling process was killed"
    process.join()
    return error


def _build(operator: Operator, sender: Connection) -> None:
    try:
        load_operators([operator])
    except Exception as error:
        sender.send(str(error) or type(error).__name__)
    else:
        sender.send("")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process of ours builds or loads the operator of this folder meanwhile; it waits for its turn.

    torch's own lock is a file that a killed build leaves behind, for which everybody after it waits for ever: what
    lies there while this lock is held is such a one.
    """
    with folder.with_suffix(".turn").open("wb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield
