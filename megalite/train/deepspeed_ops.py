"""What a run under DeepSpeed asks of the machine, said before ranks wait for each other; its compiled operators."""

import fcntl
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
from torch import nn
from torch.utils import cpp_extension

from megalite.errors import ConfigError, Problem
from megalite.topology.parameters import Parameter
from megalite.train.optimizer import OptimizerSettings, filled_groups, keep_average


def require_precision(precision: str) -> None:
    """Raises ConfigError where DeepSpeed refuses the number type on this machine, as most CPUs' fp16."""
    accelerator = get_accelerator()
    # A GPU is not asked here: the question would start CUDA, which no fork survives.
    if precision == "fp16" and accelerator.device_name() == "cpu" and not accelerator.is_fp16_supported():
        problem = Problem(
            "training.precision",
            '"fp16" with ZeRO needs a GPU: DeepSpeed refuses it on this CPU',
            'use "bf16" or "fp32", or leave [deepspeed] out',
        )
        raise ConfigError([problem])


def build_operator(config: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Compile DeepSpeed's AdamW for what `config`, its JSON, asks for, where that was not done before.

    In a process of its own, since to find out what a GPU can do starts CUDA, which no fork survives. Raises
    ConfigError when it cannot be compiled.
    """
    builder = _builder(config)
    folder = _folder(builder)
    if (folder / f"{builder.name}.so").exists():
        return
    missing = _missing_programs()
    if missing:
        raise _cannot_be_built(builder, f"it is compiled here, and {missing} is missing", "install it")
    say(f"deepspeed.native_optimizer: compiling {builder.name} in {folder}, once; it takes a minute or more")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_build, args=(builder, sender))
    process.start()
    sender.close()
    try:
        error = receiver.recv()
    except EOFError:
        error = "the compiling process was killed"
    process.join()
    if error:
        raise _cannot_be_built(builder, f"it does not compile: {error}", "see what the compiler says")


def native_optimizer(
    config: Mapping[str, Any],
    settings: OptimizerSettings,
    parameters: Sequence[Parameter],
    tensors: Mapping[str, nn.Parameter],
) -> torch.optim.Optimizer:
    """DeepSpeed's own AdamW: on the CPU where its state lies there, else fused on the GPU."""
    builder = _builder(config)
    with _alone(_folder(builder)):
        builder.load(verbose=False)
    groups = filled_groups(settings, parameters, tensors)
    adam = DeepSpeedCPUAdam if isinstance(builder, CPUAdamBuilder) else FusedAdam
    optimizer: torch.optim.Optimizer = adam(groups, lr=0.0, betas=settings.betas, eps=settings.eps)
    keep_average(optimizer, settings)
    return optimizer


def replay_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Bring what DeepSpeed's AdamW on the CPU hides from its state to where so many updates leave it, to the bit.

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


def _builder(config: Mapping[str, Any]) -> Any:
    offload = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    on_cpu = offload == "cpu" or get_accelerator().device_name() == "cpu"
    return CPUAdamBuilder() if on_cpu else FusedAdamBuilder()


def _folder(builder: Any) -> Path:
    return Path(cpp_extension._get_build_directory(builder.name, False))


def _missing_programs() -> str:
    compiler = cpp_extension.get_cxx_compiler()
    found = {"ninja": cpp_extension.is_ninja_available(), compiler: shutil.which(compiler) is not None}
    return " and ".join(name for name, there in found.items() if not there)


def _build(builder: Any, sender: Connection) -> None:
    try:
        with _alone(_folder(builder)):
            builder.load(verbose=False)
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


def _cannot_be_built(builder: Any, message: str, remedy: str) -> ConfigError:
    problem = Problem(
        "deepspeed.native_optimizer", f"needs {builder.name}: {message}", f"{remedy}, or set it to false"
    )
    return ConfigError([problem])
