"""Recompute: forward keeps only a region's inputs; backward computes the region's saved tensors again.

Chen et al., "Training deep nets with sublinear memory cost", 2016; selective: Korthikanti et al., 2022.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), keeping no saved tensor for backward: only the inputs and the function itself.

    function must give the same tensors when it is called again, and change neither its inputs nor what its own
    operators save. Unlike torch.utils.checkpoint, it recomputes once even if backward makes several passes.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    region = _Region(function, inputs)
    with saved_tensors_hooks(region.leave_out, _Omitted.read):
        return function(*inputs)


class _Omitted:
    """Placeholder in the graph for a tensor of a region; the graph drops it after the last pass that reads it."""

    def __init__(self, region: "_Region", tensor: Tensor):
        self._region, self._facts = region, _facts(tensor)
        self._tensor: Tensor | None = None
        self._version = 0

    def fill(self, tensor: Tensor) -> None:
        if _facts(tensor) != self._facts:
            raise AssertionError(f"recompute gave {_facts(tensor)}, forward {self._facts}")
        self._tensor, self._version = tensor.detach(), tensor._version

    def read(self) -> Tensor:
        if self._tensor is None:
            self._region.run_again()
        assert self._tensor is not None
        if self._tensor._version != self._version:
            raise AssertionError("a recomputed tensor was overwritten before the backward read it")
        return self._tensor


class _Enough(Exception):
    """Raised when every tensor that backward will read has been recomputed."""


class _Region:
    """One call of a recomputed function."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]):
        self._function, self._inputs = function, inputs
        self._versions = [tensor._version for tensor in inputs]
        # Weak references: the graph alone decides how long a recomputed tensor lives.
        self._omitted: list[ref[_Omitted]] = []

    def leave_out(self, tensor: Tensor) -> _Omitted:
        omitted = _Omitted(self, tensor)
        self._omitted.append(ref(omitted))
        return omitted

    def run_again(self) -> None:
        """Recompute every omitted tensor, in the order in which forward saved them, and stop after the last."""
        if [tensor._version for tensor in self._inputs] != self._versions:
            raise AssertionError("an input of a recomputed region was overwritten before the backward")
        waiting = iter(self._omitted)
        left = len(self._omitted)

        def fill(tensor: Tensor) -> None:
            nonlocal left
            omitted = next(waiting)()
            if omitted is not None:
                omitted.fill(tensor)
            left -= 1
            if not left:
                raise _Enough

        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        try:
            with torch.enable_grad(), saved_tensors_hooks(fill, _never):
                self._function(*inputs)
        except _Enough:
            return
        raise AssertionError(f"recompute saved {left} tensors fewer than forward")


def _facts(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a recompute is thrown away")
