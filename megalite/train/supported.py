"""What the configuration allows and this version of the trainer does not run yet; torch-free, asked before all else."""

from collections.abc import Iterator

from megalite.config.schema import RunConfig
from megalite.errors import ConfigError, Problem


def require_supported(config: RunConfig, source: str) -> None:
    """Raises ConfigError with everything that a later version will run; `source` names where the user wrote it."""
    problems = list(_unsupported(config))
    if problems:
        raise ConfigError(problems, source)


def _unsupported(config: RunConfig) -> Iterator[Problem]:
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
