"""The number type of weights and activations."""

import torch

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
