"""How many kernels the plain torch forms launch: on an accelerator each reads and writes its tensors once more."""

import pytest
import torch

from megalite.ops.adamw import AdamWRule, AdamWTensors
from megalite.ops.choice import PLAIN_TORCH
from tests.support.counting import kernels, new_bytes


def test_swiglu_writes_its_gradient_into_the_packed_layout() -> None:
    gate_up = torch.randn(6, 10, requires_grad=True)

    def both() -> None:
        activated = PLAIN_TORCH.glu.swiglu(gate_up)
        torch.autograd.grad(activated, gate_up, torch.ones_like(activated))

    launched = kernels(both)
    assert launched.pop("ones_like") == 1
    assert launched == {"silu": 2, "mul_": 1, "mul": 2, "silu_backward": 1}


def test_the_gradient_norm_takes_all_tensors_at_once() -> None:
    tensors = [torch.randn(3, 5).to(dtype) for dtype in (torch.bfloat16, torch.float32) * 20]
    launched = kernels(lambda: PLAIN_TORCH.sum_of_squares(tensors))
    assert launched.pop("_foreach_norm") == 2, "one for each dtype"
    assert sum(launched.values()) <= 6, launched


def test_the_gradient_norm_adds_the_tensors_in_their_order() -> None:
    """The bits of a loop over the tensors, whatever their number and dtypes."""
    generator = torch.Generator().manual_seed(5)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    tensors = [torch.randn(7 * n, generator=generator).to(dtypes[n % 4]) for n in range(300)]
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        at_least_fp32 = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        total += torch.linalg.vector_norm(at_least_fp32).double().square()
    assert torch.equal(PLAIN_TORCH.sum_of_squares(tensors), total)


def test_adamw_takes_all_tensors_at_once() -> None:
    weights, means, squares = ([torch.rand(4) for _ in range(9)] for _ in range(3))
    copies, gradients = ([torch.rand(4).bfloat16() for _ in range(9)] for _ in range(2))
    rule = AdamWRule(1e-2, (0.9, 0.95), 1e-8, 0.1, 7, 0.5)
    launched = kernels(
        lambda: PLAIN_TORCH.adamw(AdamWTensors(weights, copies, gradients, means, squares), rule)
    )
    assert launched == {"_foreach_mul_": 1, "_fused_adamw_": 1, "_foreach_copy_": 2, "full": 1}
    assert all(torch.equal(copy, weight.bfloat16()) for copy, weight in zip(copies, weights, strict=True))


@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("float32",) * 2, ("float32", "bfloat16")], ids=str)
def test_adamw_holds_one_copy_of_the_gradients_and_leaves_the_callers(dtypes: tuple[str, str]) -> None:
    weights, means, squares = ([torch.rand(500) for _ in range(2)] for _ in range(3))
    gradients = [torch.rand(500).to(getattr(torch, name)) for name in dtypes]
    before = [each.clone() for each in gradients]
    tensors = AdamWTensors(weights, [], gradients, means, squares)
    rule = AdamWRule(1e-2, (0.9, 0.95), 1e-8, 0.1, 7, 0.5)
    made = new_bytes(lambda: PLAIN_TORCH.adamw(tensors, rule), [*weights, *gradients, *means, *squares])
    assert 4 * 1000 <= made <= 4.1 * 1000, made
    assert all(map(torch.equal, gradients, before))
