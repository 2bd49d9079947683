"""What the configuration allows and this version of the trainer does not run yet; torch-free, asked before all else."""

import importlib.util
from collections.abc import Iterator

from megalite.config.schema import RunConfig
from megalite.errors import ConfigError, Problem


def require_supported(config: RunConfig, source: str) -> None:
    """Raises ConfigError with everything that a later version will run; `source` names where the user wrote it."""
    problems = list(_unsupported(config))
    if problems:
        raise ConfigError(problems, source)


def asked_precision(config: RunConfig) -> str:
    """`training.precision`, where "auto" leaves out what is not run."""
    precision = config.training.precision
    return "fp32" if precision == "auto" and config.zero_stage else precision


def _unsupported(config: RunConfig) -> Iterator[Problem]:
    if config.monitor.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield Problem(
            "monitor.tensorboard",
            "the package tensorboard is not installed",
            "install it (pip install tensorboard), or leave the setting out: metrics.jsonl has the same numbers",
        )
    if config.training.precision == "fp16" and config.zero_stage:
        yield Problem(
            "training.precision",
            '"fp16" with ZeRO is not run by this version of the trainer: DeepSpeed refuses it on a CPU',
            'use "bf16", or leave [deepspeed] out',
        )
    zero = config.deepspeed_json().get("zero_optimization", {}) if config.zero_stage else {}
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device", "none") not in ("none", "cpu"):
            yield Problem(
                f"deepspeed.zero_optimization.{key}",
                f"offload to {zero[key]['device']} is not run by this version of the trainer",
                'use device "cpu", or leave it out',
            )
