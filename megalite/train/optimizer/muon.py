"""Muon: orthogonalised momentum for the matrices of the layers, AdamW for all other weights.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (kellerjordan.github.io/posts/muon), with
the scale of Liu et al., "Muon is scalable for LLM training", 2025, which matches the size of AdamW's updates, so that
both parts share one learning rate and weight decay.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.matrices import MatrixShard, map_matrices, matrix_shards
from megalite.topology.optimizers import MOMENTUM
from megalite.train.optimizer.adamw import TorchAdamW
from megalite.train.optimizer.rule import OptimizerParts, UpdateRule

# The coefficients of Jordan et al. and the number of iterations, as in torch.optim.Muon.
_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
_RMS_OF_ADAMW = 0.2


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return U S V^T of a matrix U D V^T, with singular values S of about 1 (0.7 to 1.2), in the matrix's dtype.

    Five Newton-Schulz iterations of degree 5 (Jordan et al. 2024). matrix: [rows, columns], not changed.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    # The Frobenius norm bounds the spectral norm, which must be at most 1.
    wide = wide / wide.norm().clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


class Muon(UpdateRule):
    """Muon over matrices that are split over tensor-parallel ranks, and torch's fused AdamW over all other weights.

    Every canonical matrix is orthogonalised whole, each part of a fused weight by itself, whatever the layout. In one
    process the update of a matrix is that of torch.optim.Muon with Nesterov momentum and
    adjust_lr_fn="match_rms_adamw".

    dtype: of the Newton-Schulz products; None: that of the weight. torch.optim.Muon always takes bfloat16.
    """

    def __init__(self, parts: OptimizerParts, *, dtype: torch.dtype | None = None):
        settings = parts.settings.optimizer
        self._matrices = parts.groups([each for each in parts.parameters if each.is_hidden_matrix])
        others = parts.groups([each for each in parts.parameters if not each.is_hidden_matrix])
        # AdamW gets the same group objects, so a learning rate set in one is set in both.
        super().__init__([*self._matrices, *others], {"lr": 0.0, "momentum": settings.momentum_or_default})
        self._sharding, self._mesh, self._dtype = parts.sharding, parts.mesh, dtype
        self._adamw: TorchAdamW | None = None
        if others:
            self._adamw = TorchAdamW(others, betas=settings.betas, eps=settings.eps)
            self._adamw.state = self.state

    def initial_state(self, weight: Tensor) -> dict[str, Any]:
        # Every weight counts its updates: a pipeline stage may have no other weights than matrices.
        if self._sharding[weight].is_hidden_matrix:
            return {"step": torch.zeros((), dtype=torch.float32), MOMENTUM: torch.zeros_like(weight)}
        assert self._adamw is not None
        return self._adamw.initial_state(weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient, and overwrite the gradients. Collective, see `map_matrices`."""
        if self._adamw is not None:
            self._adamw.step()
        for group in self._matrices:
            weights = self.weights_with_gradients(group)
            if weights:
                self._update(group, weights)

    def _update(self, group: Mapping[str, Any], weights: Sequence[Tensor]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        states = [self.state[weight] for weight in weights]
        torch._foreach_add_([state["step"] for state in states], 1)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        buffers = [state[MOMENTUM] for state in states]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)  # Nesterov
        torch._foreach_mul_([*weights], 1 - rate * group["weight_decay"])
        directions = [each if self._dtype is None else each.to(self._dtype) for each in gradients]
        updates = map_matrices(self._shards(weights, directions), orthogonalised)
        for shard, update in zip(self._shards(weights, weights), updates, strict=True):
            scale = _RMS_OF_ADAMW * sqrt(max(shard.part.shape))
            shard.values.add_(update, alpha=-rate * scale)

    def _shards(self, weights: Sequence[Tensor], values: Sequence[Tensor]) -> list[MatrixShard]:
        """Return the slices of `values`, tensors with the shapes of `weights`."""
        pairs = zip(weights, values, strict=True)
        return [
            shard
            for weight, tensor in pairs
            for shard in matrix_shards(self._sharding[weight], tensor, self._mesh)
        ]


def make(parts: OptimizerParts) -> torch.optim.Optimizer:
    """Return Muon, with products in bfloat16 for low-precision models on an accelerator, as in torch.

    A CPU without instructions for bfloat16 takes 26 times as long for them as in float32.
    """
    low_precision = parts.mesh.device.type != "cpu" and bool(parts.copies)
    return Muon(parts, dtype=torch.bfloat16 if low_precision else None)
