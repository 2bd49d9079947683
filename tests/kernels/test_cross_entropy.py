"""The compiled cross entropy against float64, torch's and the plain form: one shard, several shards, odd row sizes."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.model.layer import name_libraries_without_spaces
from megalite.ops.cross_entropy import (
    COMPILED_CROSS_ENTROPY,
    TORCH_CROSS_ENTROPY,
    Targets,
    compiled_shard_statistics,
    compiled_write_gradient,
)
from megalite.parallel.cross_entropy import (
    IGNORE_INDEX,
    LossTerms,
    VocabularyShard,
    vocab_parallel_cross_entropy,
)
from megalite.parallel.mesh import ALONE
from tests.support.kernels import DTYPES, needs_library
from tests.support.parity import FLOAT32_RTOL, OPERATOR_RTOL, SLOPE_RTOL, assert_close, assert_no_worse
from tests.unit.parallel.test_cross_entropy import torchs

OPERATORS = {False: TORCH_CROSS_ENTROPY, True: COMPILED_CROSS_ENTROPY}

pytestmark = needs_library

TERMS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "both": {"label_smoothing": 0.3, "z_loss": 1e-4},
}
# Row sizes within a block of the kernel, at its edges and over several blocks; odd sizes too.
WIDTHS = (1, 7, 16, 2048, 2049, 20007)


def tokens(rows: int, columns: int, dtype: torch.dtype, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random logits, labels (one ignored if there are at least three), and weights, one of them 0."""
    logits = (torch.randn(1, rows, columns) * spread).to(dtype)
    labels = torch.randint(columns, (1, rows))
    loss_mask = 2 * torch.rand(1, rows)
    if rows > 2:
        labels[0, 1], loss_mask[0, 2] = IGNORE_INDEX, 0
    return logits, labels, loss_mask


def loss_and_gradient(
    logits: Tensor, labels: Tensor, loss_mask: Tensor, terms: LossTerms, *, fused: bool
) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    shard = VocabularyShard(range(logits.shape[-1]), ALONE, OPERATORS[fused])
    losses = vocab_parallel_cross_entropy(leaf, labels, loss_mask, shard, terms)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def assert_as_good_as_torch(logits: Tensor, labels: Tensor, loss_mask: Tensor, terms: LossTerms) -> None:
    """Compare with torch's loss in float64 (`exact`) and in the logits' dtype, at least float32 (`plain`)."""
    exact = torchs(logits.double(), labels, loss_mask.double(), terms)
    wide = torch.promote_types(logits.dtype, torch.float32)
    plain_losses, plain_gradient = torchs(logits.to(wide), labels, loss_mask.to(wide), terms)
    losses, gradient = loss_and_gradient(logits, labels, loss_mask, terms, fused=True)
    what = f"of {tuple(logits.shape)}, {terms}"
    assert_no_worse(losses, plain_losses, exact[0], what=f"losses {what}")
    # Softmax minus target is a difference of numbers up to the largest weight, 2, and is measured relative to these; in
    # bf16 and fp16 the rounding of the result itself is larger.
    scale = 4.0 if logits.element_size() >= 4 else 0.0
    gradients = (gradient, plain_gradient.to(logits.dtype), exact[1])
    scaled = [torch.cat([each.flatten(), each.new_full((1,), scale)]) for each in gradients]
    assert_no_worse(*scaled, what=f"gradient {what}")


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradients_are_as_good_as_torchs(dtype, terms):
    for columns in WIDTHS:
        assert_as_good_as_torch(*tokens(5, columns, dtype), LossTerms(columns, **TERMS[terms]))


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 5000),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    offset=st.sampled_from([0.0, -300.0, 1e4]),
    terms=st.sampled_from(sorted(TERMS)),
    seed=st.integers(0, 2**32),
)
def test_any_rows_of_huge_logits_have_torchs_losses(rows, columns, spread, offset, terms, seed):
    """Compare float32 with float64 over all rows together: in a single row torch's error may happen to be 0."""
    torch.manual_seed(seed)
    logits, labels, loss_mask = tokens(rows, columns, torch.float32, spread)
    logits, loss = logits + offset, LossTerms(columns, **TERMS[terms])
    exact = torchs(logits.double(), labels, loss_mask.double(), loss)
    for seen, expected in zip(
        loss_and_gradient(logits, labels, loss_mask, loss, fused=True), exact, strict=True
    ):
        assert_close(1 + seen.double(), 1 + expected, rtol=FLOAT32_RTOL)


def test_a_vocabulary_of_256k_is_as_good_as_torchs():
    assert_as_good_as_torch(*tokens(3, 262144, torch.float32), LossTerms(262144, 0.1, 1e-4))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_masked_row_may_hold_anything(value, dtype, terms, fused):
    logits, labels, loss_mask = tokens(5, 37, dtype)
    spoilt = logits.clone()
    spoilt[0, 1, 4] = value
    spoilt[0, 2] = value
    run = partial(loss_and_gradient, labels=labels, loss_mask=loss_mask, terms=LossTerms(37, **TERMS[terms]))
    losses, gradient = run(spoilt, fused=fused)
    assert not losses[0, 1:3].any() and not gradient[0, 1:3].any()
    for spoiled, whole in zip((losses, gradient), run(logits, fused=fused), strict=True):
        assert torch.equal(spoiled, whole)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_fully_masked_batch_gives_zeros(fused):
    logits = torch.full((1, 3, 11), float("nan"))
    labels = torch.full((1, 3), IGNORE_INDEX)
    losses, gradient = loss_and_gradient(
        logits, labels, torch.ones(1, 3), LossTerms(11, 0.1, 0.1), fused=fused
    )
    assert not losses.any() and not gradient.any()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_in_a_counted_row_is_not_hidden(value, fused):
    logits, labels, _ = tokens(2, 37, torch.float32)
    logits[0, 1, 36] = value
    losses, gradient = loss_and_gradient(logits, labels, torch.ones(1, 2), LossTerms(37), fused=fused)
    assert losses[0].isfinite().tolist() == [True, False]
    assert gradient[0].isfinite().all(dim=-1).tolist() == [True, False]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_an_id_may_be_forbidden(fused):
    logits, labels, _ = tokens(2, 37, torch.float64)
    labels[:] = 5
    logits[..., 6:] = float("-inf")
    losses, gradient = loss_and_gradient(logits, labels, torch.ones(1, 2), LossTerms(37), fused=fused)
    expected = torchs(logits[..., :6], labels, torch.ones(1, 2), LossTerms(6))
    assert_close(losses, expected[0], rtol=OPERATOR_RTOL)
    assert_close(gradient[..., :6], expected[1], rtol=OPERATOR_RTOL)
    assert not gradient[..., 6:].any()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("cuts", [(9, 37), (1, 2, 36), (0, 20)], ids=str)
def test_statistics_of_unequal_shards_are_those_of_the_whole(cuts, fused):
    """Statistics of shards combine correctly, also with shards whose logits are all -inf."""
    logits, labels, _ = tokens(6, 37, torch.float64, spread=30.0)
    logits, labels, weights = logits[0], labels[0].clamp(min=0), torch.ones(6, dtype=torch.float64)
    logits[0, :9], labels[0] = float("-inf"), 30
    uniform = 0.0 if logits.isinf().any() else 0.1 / 37

    def of(shard: range) -> Tensor:
        piece = logits[:, shard.start : shard.stop].clone()
        return OPERATORS[fused].statistics(piece, weights, Targets(labels, shard.start, 0.9, uniform))

    bounds = [0, *(cut for cut in cuts if 0 < cut < 37), 37]
    shards = [range(*pair) for pair in pairwise(bounds)]
    maxima, sums, expected = torch.stack([of(shard) for shard in shards]).unbind(dim=1)
    whole = of(range(37))
    shift = maxima - whole[0]
    here = torch.stack([(labels >= each.start) & (labels < each.stop) for each in shards])
    mass = 0.9 * here.double() + torch.tensor([[len(each) * uniform] for each in shards], dtype=torch.float64)
    assert torch.equal(maxima.amax(dim=0), whole[0])
    assert_close((sums * shift.exp()).sum(dim=0), whole[1], rtol=OPERATOR_RTOL)
    assert_close((expected + mass * shift).sum(dim=0), whole[2], rtol=OPERATOR_RTOL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    inputs = tokens(7, 5003, dtype)
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(loss_and_gradient(*inputs, LossTerms(5003, 0.1, 0.01), fused=True))
    torch.set_num_threads(threads)
    for losses, gradient in results[1:]:
        assert torch.equal(losses, results[0][0]) and torch.equal(gradient, results[0][1])


def test_the_gradient_is_written_over_the_logits_of_their_type():
    logits, labels, loss_mask = tokens(4, 50, torch.bfloat16)
    logits.requires_grad_()
    losses = fused_losses(logits, labels, loss_mask)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16 and gradient.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_loss_may_have_a_gradient_of_its_own(dtype):
    """Upstream gradients other than the 1 that the forward assumes."""
    logits, labels, loss_mask = tokens(5, 4099, dtype)
    grad = 3 * torch.randn(1, 5, dtype=torch.promote_types(dtype, torch.float32))
    exact, plain, fused = (
        logits.to(each, copy=True).requires_grad_() for each in (torch.float64, grad.dtype, dtype)
    )
    for leaf in (exact, plain):
        losses = F.cross_entropy(leaf[0], labels[0], reduction="none", ignore_index=IGNORE_INDEX)
        losses.backward((loss_mask * grad)[0].to(leaf.dtype))
    fused_losses(fused, labels, loss_mask).backward(grad)
    assert_no_worse(fused.grad, plain.grad.to(dtype), exact.grad, what="gradient")


def fused_losses(logits: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    columns = logits.shape[-1]
    shard = VocabularyShard(range(columns), ALONE, COMPILED_CROSS_ENTROPY)
    return vocab_parallel_cross_entropy(logits, labels, loss_mask, shard, LossTerms(columns))


def test_without_a_gradient_the_logits_stay():
    logits, labels, loss_mask = tokens(4, 50, torch.float32)
    kept = logits.clone()
    with torch.no_grad():
        losses = fused_losses(logits.requires_grad_(), labels, loss_mask)
    assert torch.equal(logits, kept)
    assert torch.equal(fused_losses(logits.detach(), labels, loss_mask), losses) and torch.equal(logits, kept)
    assert_close(fused_losses(logits, labels, loss_mask), losses, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_who_else_needs_the_logits_is_refused(dtype):
    logits, labels, loss_mask = tokens(4, 50, dtype)
    squares = logits.requires_grad_().square().sum()
    losses = fused_losses(logits, labels, loss_mask).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward()
        squares.backward()


def test_the_gradient_exists_once_and_has_none_itself():
    logits, labels, loss_mask = tokens(4, 50, torch.float32)
    losses = fused_losses(logits.requires_grad_(), labels, loss_mask).sum()
    (gradient,) = torch.autograd.grad(losses, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match="backward runs once"):
        losses.backward()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("terms", TERMS)
def test_gradients_are_those_of_small_differences(terms, fused):
    """Check gradients by differences; gradcheck cannot be used, because it runs one backward several times."""
    logits, labels, loss_mask = tokens(4, 11, torch.float64)
    run = partial(
        loss_and_gradient,
        labels=labels,
        loss_mask=loss_mask,
        terms=LossTerms(11, **TERMS[terms]),
        fused=fused,
    )
    _, gradient = run(logits)
    slopes = torch.empty_like(gradient)
    for column in range(11):
        step = torch.zeros_like(logits)
        step[..., column] = 1e-6
        slopes[..., column] = (run(logits + step)[0] - run(logits - step)[0]) / 2e-6
    assert_close(gradient, slopes, rtol=SLOPE_RTOL)


# ------------------------------------------------------------------------------------------------- torch's own checks


def arguments(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    logits, labels = torch.randn(4, 9).to(dtype), torch.tensor([10, 18, 3, 12])
    return tuple(each.to(device) for each in (logits, labels, torch.rand(4, dtype=wide)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_are_registered_as_torch_wants_them(dtype):
    logits, labels, values = arguments(dtype)
    operators = torch.ops.megalite
    torch.library.opcheck(
        operators.cross_entropy_statistics.default, (logits, labels, values, 10, 0.9, 0.1 / 40)
    )
    torch.library.opcheck(
        operators.cross_entropy_gradient_.default, (logits, labels, values, values, values, 10, 0.9, 0.1 / 40)
    )
    if logits.dtype == values.dtype:
        torch.library.opcheck(
            operators.cross_entropy_losses_.default, (logits, labels, values, 10, 0.9, 0.1 / 40, 0.01)
        )


def test_a_narrow_gradient_is_not_made_before_its_factor_is_known():
    with pytest.raises(RuntimeError, match="megalite: logits must be float32 or float64"):
        torch.ops.megalite.cross_entropy_losses_(*arguments(torch.bfloat16), 10, 1.0, 0.0, 0.0)


def both_operators(logits: Tensor, labels: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    targets = Targets(labels, 10, 0.9, 0.1 / 40)
    statistics = compiled_shard_statistics(logits, values, targets)
    compiled_write_gradient(logits, statistics[0], values / statistics[1], values, targets)
    return statistics, logits


def test_operators_compile_whole():
    logits, labels, values = arguments(torch.float32)
    name_libraries_without_spaces()
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(both_operators, fullgraph=True)
    for seen, expected in zip(
        compiled(logits.clone(), labels, values), both_operators(logits.clone(), labels, values), strict=True
    ):
        assert_close(seen, expected, rtol=FLOAT32_RTOL)


def test_operators_know_their_shapes_without_data():
    statistics, gradient = both_operators(*arguments(torch.bfloat16, "meta"))
    assert (
        statistics.shape == (3, 4) and statistics.dtype == torch.float32 and statistics.device.type == "meta"
    )
    assert gradient.shape == (4, 9) and gradient.dtype == torch.bfloat16


WRONG = {
    "rows of another stride": lambda logits, labels, values: (logits.t().contiguous().t(), labels, values),
    "labels of 32 bits": lambda logits, labels, values: (logits, labels.int(), values),
    "too few labels": lambda logits, labels, values: (logits, labels[:3], values),
    "narrow weights": lambda logits, labels, values: (logits, labels, values.bfloat16()),
    "whole numbers": lambda logits, labels, values: (logits.int(), labels, values),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(wrong):
    inputs = WRONG[wrong](*arguments(torch.float32))
    with pytest.raises(RuntimeError, match="megalite: "):
        torch.ops.megalite.cross_entropy_statistics(*inputs, 10, 1.0, 0.0)
