"""What a run under DeepSpeed asks of the machine: said before ranks wait for each other."""

from deepspeed.accelerator import get_accelerator

from megalite.errors import ConfigError, Problem


def require_precision(precision: str) -> None:
    """Raises ConfigError where DeepSpeed refuses the number type on this machine, as most CPUs' fp16."""
    accelerator = get_accelerator()
    # Of GPUs only a CPU is asked here: the question would start CUDA, which no fork survives.
    if precision == "fp16" and accelerator.device_name() == "cpu" and not accelerator.is_fp16_supported():
        problem = Problem(
            "training.precision",
            '"fp16" with ZeRO needs a GPU: DeepSpeed refuses it on this CPU',
            'use "bf16" or "fp32", or leave [deepspeed] out',
        )
        raise ConfigError([problem])
