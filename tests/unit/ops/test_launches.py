"""How many kernels the plain torch forms launch: on an accelerator each reads and writes its tensors once more."""

import torch

from megalite.ops.choice import PLAIN_TORCH
from tests.support.counting import kernels


def test_swiglu_writes_its_gradient_into_the_packed_layout() -> None:
    gate_up = torch.randn(6, 10, requires_grad=True)

    def both() -> None:
        activated = PLAIN_TORCH.glu.swiglu(gate_up)
        torch.autograd.grad(activated, gate_up, torch.ones_like(activated))

    launched = kernels(both)
    assert launched.pop("ones_like") == 1
    assert launched == {"silu": 2, "mul_": 1, "mul": 2, "silu_backward": 1}
