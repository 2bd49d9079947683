"""The number type of weights and activations."""

import torch

from megalite.errors import ConfigError, Problem

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def training_dtype(precision: str) -> torch.dtype:
    """Raises ConfigError for a precision that this version of the trainer does not run."""
    if precision not in _DTYPES:
        problem = Problem(
            "training.precision",
            f'"{precision}" is not run by this version of the trainer',
            'use "auto" or "fp32"',
        )
        raise ConfigError([problem])
    return _DTYPES[precision]
