"""The optimizer's operators: against float64, against torch's AdamW, and where the trainer uses them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.config.sections.schema import OptimizerConfig
from megalite.ops.adamw import (
    AdamWRule,
    AdamWTensors,
    adamw_,
    compiled_accumulate_,
    compiled_adamw_,
    compiled_add_weight_gradient_,
    compiled_sum_of_squares,
    sum_of_squares,
)
from megalite.ops.choice import ALL_COMPILED, PLAIN_TORCH
from megalite.parallel import layers
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients
from megalite.parallel.mesh import ParallelMesh
from megalite.train.optimizer.adamw import OnePassAdamW
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.torch import TorchOptimizer
from tests.support.kernels import needs_library
from tests.support.options import changed
from tests.support.parity import BF16_RTOL, FLOAT32_RTOL, OPERATOR_RTOL, assert_close, assert_no_worse
from tests.unit.train.optimizer.test_optimizer import NORM, made

pytestmark = needs_library

RULES = {
    "learning_rate": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "gradient_scale": 0.37,
}
# The dtypes of weights, gradients and copies.
TYPES = [
    (torch.float32, torch.float32, None),
    (torch.float64, torch.float64, None),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.float32, torch.bfloat16, torch.float16),
]
# Sizes around a chunk of 8192, empty tensors, and more tensors than one launch's table holds.
SHAPES = [(0,), (1,), (7,), (8191,), (8192,), (8193,), (3, 5, 7), (0, 3), (20011,), *[(5,)] * 80]
ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5))


def lists(
    shapes: Any, weight: torch.dtype, gradient: torch.dtype, copy: torch.dtype | None
) -> list[list[Tensor]]:
    """Return random weights, copies filled with NaN, gradients and moments."""
    return [
        [torch.randn(shape, dtype=weight) for shape in shapes],
        [torch.full(shape, float("nan"), dtype=copy) for shape in shapes] if copy else [],
        [torch.randn(shape, dtype=gradient) for shape in shapes],
        [torch.randn(shape, dtype=weight) for shape in shapes],
        [torch.rand(shape, dtype=weight) for shape in shapes],
    ]


def cloned(given: list[list[Tensor]], dtype: torch.dtype | None = None) -> list[list[Tensor]]:
    return [[each.to(dtype or each.dtype, copy=True) for each in one] for one in given]


def check_update(shapes: Any, types: Any, step: float) -> None:
    given = lists(shapes, *types)
    fused, plain, exact = cloned(given), cloned(given), cloned(given, torch.float64)
    compiled_adamw_(AdamWTensors(*fused), AdamWRule(**RULES, step=step))
    adamw_(AdamWTensors(*plain), AdamWRule(**RULES, step=step))
    adamw_(AdamWTensors(*exact), AdamWRule(**RULES, step=step))
    for name, *alike in zip(
        ("weight", "copy", "gradient", "mean", "square"), fused, plain, exact, strict=True
    ):
        if not alike[0]:
            continue
        # All tensors together: in a tensor of one number torch's error may happen to be 0.
        ours, torchs, reference = (torch.cat([each.flatten() for each in tensors]) for tensors in alike)
        if name == "gradient":
            reference = ours.double()  # it is read only
        assert_no_worse(ours, torchs, reference, what=name)
    for copy, weight in zip(fused[1], fused[0], strict=False):
        assert torch.equal(copy, weight.to(copy.dtype)), "the copy is the rounded weight"


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("step", [1.0, 1000.0])
def test_an_update_is_torchs(types, step):
    check_update(SHAPES, types, step)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 20000), min_size=1, max_size=5), st.sampled_from(TYPES))
def test_lists_of_any_sizes(sizes, types):
    check_update([(100,), *((size,) for size in sizes)], types, 3.0)


def test_steps_equal_torchs_optimizer():
    start = [torch.randn(shape) for shape in SHAPES]
    expected = [torch.nn.Parameter(each.clone()) for each in start]
    reference = torch.optim.AdamW(expected, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    weights, moments = (
        [each.clone() for each in start],
        [[torch.zeros_like(each) for each in start] for _ in "mv"],
    )
    for step in range(1, 11):
        gradients = [torch.randn_like(each) for each in start]
        for weight, gradient in zip(expected, gradients, strict=True):
            weight.grad = gradient.clone()
        reference.step()
        rule = AdamWRule(**RULES | {"gradient_scale": 1.0}, step=step)
        compiled_adamw_(AdamWTensors(weights, [], gradients, *moments), rule)
    for ours, torchs in zip(weights, expected, strict=True):
        assert_close(ours, torchs, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_sum_of_squares(dtype):
    tensors = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    exact = sum((each.double().square().sum() for each in tensors), torch.zeros((), dtype=torch.float64))
    assert_close(compiled_sum_of_squares(tensors), exact, rtol=OPERATOR_RTOL)
    assert_close(sum_of_squares(tensors), exact, rtol=FLOAT32_RTOL)
    # Squares beyond float32's range, mixed dtypes, and a gradient that is not contiguous.
    large = torch.full((3, 2), 2.0**100, dtype=torch.float32).t()
    assert_close(compiled_sum_of_squares([large, tensors[3]]), 6 * 2.0**200, rtol=OPERATOR_RTOL)
    for bad in (float("inf"), float("nan")):
        assert not compiled_sum_of_squares([tensors[3], torch.tensor([bad], dtype=dtype)]).isfinite()


def test_threads_do_not_change_a_bit():
    tensors, threads = [torch.randn(100_003), torch.randn(70_001)], torch.get_num_threads()
    try:
        sums = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            sums.add(compiled_sum_of_squares(tensors).item())
    finally:
        torch.set_num_threads(threads)
    assert len(sums) == 1


@pytest.mark.parametrize("types", [each[:2] for each in TYPES[:2] + TYPES[3:5]], ids=str)
def test_gradients_are_summed_wide(types):
    total, gradient = torch.randn(9001, dtype=types[0]), torch.randn(9001, dtype=types[1])
    expected = total + gradient.to(types[0])
    compiled_accumulate_(total, gradient)
    assert torch.equal(total, expected)


def test_what_cannot_be_is_refused():
    weights = [torch.randn(4)]
    moments = [[torch.zeros(4)], [torch.zeros(4)]]
    for copies, gradients, complaint in (
        ([], [torch.randn(5)], "gradients has 5 elements, not 4"),
        ([], [], "gradients has 0 tensors, not 1"),
        ([torch.zeros(4)], [torch.randn(4)], "no kernel"),
        ([], [torch.randn(4, dtype=torch.float64)], "no kernel"),
    ):
        with pytest.raises(RuntimeError, match=complaint):
            compiled_adamw_(AdamWTensors(weights, copies, gradients, *moments), AdamWRule(**RULES, step=1))
    with pytest.raises(RuntimeError, match="not contiguous"):
        strided = torch.randn(4, 2)[:, 0]
        compiled_adamw_(AdamWTensors([strided], [], [torch.randn(4)], *moments), AdamWRule(**RULES, step=1))


def test_torch_knows_the_operators():
    given = lists([(5,), (2, 3)], torch.float32, torch.bfloat16, torch.bfloat16)
    given[1] = [each.zero_() for each in given[1]]
    torch.library.opcheck(torch.ops.megalite.sum_of_squares.default, (given[0],))
    torch.library.opcheck(torch.ops.megalite.accumulate_.default, (torch.randn(6), torch.randn(6).bfloat16()))
    arguments = (*given, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3.0, 1.0)
    torch.library.opcheck(torch.ops.megalite.adamw_.default, arguments)
    meta = torch.ops.megalite.sum_of_squares([torch.empty(3, device="meta")])
    assert meta.shape == () and meta.dtype == torch.float64


def test_a_saved_weight_that_changes_is_noticed():
    weight = torch.nn.Parameter(torch.randn(4))
    loss = weight.square().sum()
    moments = [[torch.zeros(4)], [torch.zeros(4)]]
    compiled_adamw_(AdamWTensors([weight], [], [torch.randn(4)], *moments), AdamWRule(**RULES, step=1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ------------------------------------------------------------------------------------------------------- the trainer


def trained(
    settings: OptimizerSettings, dtype: torch.dtype, steps: int, scale: float = 1.0
) -> TorchOptimizer:
    optimizer, tensors = made(settings, dtype)
    torch.manual_seed(5)
    for _ in range(steps):
        for tensor in tensors.values():
            tensor.grad = torch.randn(tensor.shape).to(tensor.grad_dtype or tensor.dtype)
        optimizer.step(1e-2, float(optimizer.squared_norm()))
    return optimizer


def state_of(optimizer: TorchOptimizer) -> dict[tuple[str, str], Tensor]:
    return {(shard.parameter.name, shard.key): shard.values for shard in optimizer.state.shards()}


@pytest.mark.parametrize("wide", [True, False], ids=["float32 sums", "16-bit sums"])
@pytest.mark.parametrize(
    "changes", [{}, {"clip_value": 0.1}, {"ema_decay": 0.5}, {"gradient_clipping": 0.0}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_trainers_step_is_the_same(dtype, changes, wide):
    plain = changed(ADAMW, accumulation="fp32" if wide else "model", **changes)
    one, other = trained(plain, dtype, 5), trained(replace(plain, operators=ALL_COMPILED), dtype, 5)
    # Clipping bf16 values in place would round them: torch's form clips in float32.
    assert isinstance(other._optimizer, OnePassAdamW) == (
        wide or "clip_value" not in changes or dtype == torch.float32
    )
    assert not isinstance(one._optimizer, OnePassAdamW)
    expected, actual = state_of(one), state_of(other)
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert_close(actual[key], values, rtol=FLOAT32_RTOL, what=str(key))
    assert one.state.scalars() == other.state.scalars()
    for name, tensor in other._tensors.items():
        assert torch.equal(tensor, other._masters[name].to(dtype)) and tensor.grad is None


@pytest.mark.parametrize("first", [True, False], ids=["on then off", "off then on"])
def test_a_run_goes_on_with_the_other_kernels(first):
    """Each form loads the other's state, and the next step is the same."""
    before, after = (ALL_COMPILED, PLAIN_TORCH) if first else (PLAIN_TORCH, ALL_COMPILED)
    half, resumed = trained(replace(ADAMW, operators=before), torch.bfloat16, 3), None
    resumed, _ = made(replace(ADAMW, operators=after), torch.bfloat16)
    source = state_of(half)
    for key, values in state_of(resumed).items():
        values.copy_(source[key])
    resumed.state.load(half.state.scalars())
    for optimizer in (half, resumed):
        torch.manual_seed(9)
        for tensor in optimizer._tensors.values():
            tensor.grad = torch.randn(tensor.shape)
        optimizer.step(1e-2, float(optimizer.squared_norm()))
    for key, values in state_of(half).items():
        assert_close(state_of(resumed)[key], values, rtol=FLOAT32_RTOL, what=str(key))
    assert resumed.state.scalars() == half.state.scalars() and resumed.state.scalars()["step"] == 4


def test_a_gradient_that_is_not_finite_changes_nothing():
    optimizer, tensors = made(changed(ADAMW, operators=ALL_COMPILED, nonfinite="skip"), torch.bfloat16)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.grad = torch.full(tensor.shape, float("inf") if name == NORM else 1.0)
    update = optimizer.step(1e-2, float(optimizer.squared_norm()))
    assert update.skipped and update.overflow == NORM
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


class _Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, total: Tensor, grad: Tensor, inputs: Tensor) -> None:
        self.calls += 1
        compiled_add_weight_gradient_(total, grad, inputs)


@pytest.mark.parametrize("bias", [False, True])
def test_linears_add_to_the_sums_that_are_there(monkeypatch, bias):
    """In-place sums equal autograd's bit for bit, without a float32 copy of each gradient."""

    def summed(in_place: bool) -> tuple[list[Tensor], int]:
        counted = _Counted()
        torch.manual_seed(4)
        gradients = WeightGradients(counted) if in_place else BY_AUTOGRAD
        common = {
            "mesh": ParallelMesh.single(),
            "dtype": torch.bfloat16,
            "bias": bias,
            "gradients": gradients,
        }
        up, down = layers.ColumnParallelLinear(6, 10, **common), layers.RowParallelLinear(10, 6, **common)
        parameters = [*up.parameters(), *down.parameters()]
        for each in parameters:
            torch.nn.init.normal_(each)
            each.grad_dtype = torch.float32
        for _ in range(3):
            inputs = torch.randn(2, 4, 6).bfloat16().requires_grad_()
            down(up(inputs).tanh()).square().sum().backward()
        return [inputs.grad, *(each.grad for each in parameters)], counted.calls

    expected, none = summed(in_place=False)
    actual, calls = summed(in_place=True)
    assert none == 0 and calls == 2 * 2, "both weights, in all micro batches but the first"
    for ours, torchs in zip(actual, expected, strict=True):
        assert torch.equal(ours, torchs) and ours.dtype == torchs.dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_tied_embedding_adds_to_its_own_rows_of_the_heads_gradient(dtype):
    """Autograd would allocate a tensor as large as the embedding table, and another one for the sum."""

    def summed(in_place: bool) -> tuple[Tensor, int]:
        torch.manual_seed(5)
        mesh = ParallelMesh.single()
        gradients = WeightGradients(compiled_add_weight_gradient_ if in_place else None)
        embedding = layers.VocabParallelEmbedding(11, 6, mesh=mesh, dtype=dtype, gradients=gradients)
        weight = embedding.weight
        torch.nn.init.normal_(weight)
        weight.grad_dtype = torch.promote_types(dtype, torch.float32)
        seen: list[Tensor | None] = []
        # A hook on the weight itself would leave its gradient to autograd.
        node = torch.autograd.graph.get_gradient_edge(weight).node
        node.register_prehook(lambda gradients: seen.append(gradients[0]))
        for _ in range(2):
            hidden_states = embedding(torch.randint(11, (2, 8)))
            logits = layers.column_linear(hidden_states.tanh(), weight, mesh=mesh, gradients=gradients)
            logits.square().sum().backward()
        assert weight.grad is not None
        return weight.grad, sum(gradient is not None for gradient in seen)

    expected, through_autograd = summed(in_place=False)
    actual, none = summed(in_place=True)
    assert through_autograd == 2 and none == 0
    assert actual.dtype == expected.dtype
    assert_close(actual, expected, rtol=OPERATOR_RTOL if dtype == torch.float64 else BF16_RTOL)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_weight_is_shown_every_gradient(hook):
    def summed(in_place: bool) -> tuple[Tensor, list[float]]:
        torch.manual_seed(6)
        gradients = WeightGradients(compiled_add_weight_gradient_ if in_place else None)
        linear = layers.ColumnParallelLinear(
            6, 10, mesh=ParallelMesh.single(), dtype=torch.float64, gradients=gradients
        )
        torch.nn.init.normal_(linear.weight)
        shown: list[float] = []

        def look(shown_tensor: Tensor | None) -> None:
            own = linear.weight.grad if hook == "register_post_accumulate_grad_hook" else shown_tensor
            shown.append(torch.nan if own is None else own.norm().item())

        getattr(linear.weight, hook)(look)
        for _ in range(3):
            linear(torch.randn(2, 4, 6, dtype=torch.float64)).square().sum().backward()
        assert linear.weight.grad is not None
        return linear.weight.grad, shown

    (expected, by_autograd), (actual, hooked) = summed(in_place=False), summed(in_place=True)
    assert len(hooked) == len(by_autograd) == 3
    assert_close(torch.tensor(hooked), torch.tensor(by_autograd), rtol=OPERATOR_RTOL)
    assert_close(actual, expected, rtol=OPERATOR_RTOL)
