"""The loss in chunks against the plain path over whole logits: losses, both gradients, what it refuses and keeps."""

import pytest
import torch
from torch import Tensor

from megalite.ops.cross_entropy import COMPILED_CROSS_ENTROPY, TORCH_CROSS_ENTROPY
from megalite.parallel.cross_entropy import (
    ChunkedHead,
    LossTerms,
    VocabularyShard,
    chunked_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megalite.parallel.mesh import ALONE
from tests.support.kernels import needs_library
from tests.support.parity import CHUNKED_RTOL, assert_close
from tests.unit.parallel.test_cross_entropy import tokens

FORMS = [False, pytest.param(True, marks=needs_library)]
VOCABULARY, HIDDEN = 37, 6
OPERATORS = {False: TORCH_CROSS_ENTROPY, True: COMPILED_CROSS_ENTROPY}
SHARDS = {fused: VocabularyShard(range(VOCABULARY), ALONE, each) for fused, each in OPERATORS.items()}
TERMS = LossTerms(VOCABULARY, label_smoothing=0.1, z_loss=0.01)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """hidden_states [3, 7, H], weight, labels, loss_mask with masked tokens among them."""
    _, labels, loss_mask = tokens(3, 7, VOCABULARY, 1.0, seed=3)
    generator = torch.Generator().manual_seed(4)
    hidden_states = torch.randn(3, 7, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden_states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, loss_mask


def chunked(*given: Tensor, chunk_tokens: int, terms: LossTerms = TERMS, fused: bool = False) -> Tensor:
    hidden_states, weight, *others = given
    head, shard = ChunkedHead(weight, None, chunk_tokens), SHARDS[fused]
    return chunked_cross_entropy(hidden_states, head, *others, shard, terms)


def plain(
    hidden_states: Tensor, weight: Tensor, *others: Tensor, terms: LossTerms = TERMS, fused: bool = False
) -> Tensor:
    logits = hidden_states @ weight.t()
    return vocab_parallel_cross_entropy(logits, *others, SHARDS[fused], terms)


@pytest.mark.parametrize("fused", FORMS, ids=["plain", "fused"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 21, 1000])
@pytest.mark.parametrize("terms", [LossTerms(VOCABULARY), TERMS], ids=["plain", "smoothed, z-loss"])
def test_losses_and_gradients_are_those_of_whole_logits(fused, chunk_tokens, terms):
    given, expected = inputs(), inputs()
    losses = chunked(*given, chunk_tokens=chunk_tokens, terms=terms, fused=fused)
    expected_losses = plain(*expected, terms=terms)
    for each in (losses, expected_losses):
        (each.sum() * 0.3).backward()
    assert_close(losses, expected_losses, what="losses")
    for name, one, other in zip(("hidden states", "weight"), given, expected, strict=False):
        assert_close(one.grad, other.grad, what=f"gradient of {name}")


@pytest.mark.parametrize("fused", FORMS, ids=["plain", "fused"])
def test_only_what_is_asked_for_has_a_gradient(fused):
    hidden_states, weight, *others = inputs()
    with torch.no_grad():
        assert not chunked(hidden_states, weight, *others, chunk_tokens=4, fused=fused).requires_grad
    chunked(hidden_states.detach(), weight, *others, chunk_tokens=4, fused=fused).sum().backward()
    expected = inputs()
    plain(*expected).sum().backward()
    assert hidden_states.grad is None
    assert_close(weight.grad, expected[1].grad, what="gradient of the weight")


def test_losses_with_gradients_of_their_own_are_refused():
    losses = chunked(*inputs(), chunk_tokens=4)
    with pytest.raises(ValueError, match="may only be summed, with equal weights"):
        (losses * torch.arange(21).view(3, 7)).sum().backward()


def test_a_gradient_that_is_one_number_by_value_is_taken():
    given, expected = inputs(), inputs()
    chunked(*given, chunk_tokens=4).backward(torch.full((3, 7), 2.0, dtype=torch.float64))
    (2 * plain(*expected).sum()).backward()
    assert_close(given[1].grad, expected[1].grad, what="gradient of the weight")


@pytest.mark.parametrize("fused", FORMS, ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_weights_have_gradients_summed_wide(dtype, fused):
    """Chunks one by one add up to more than the narrow type can say; what each is rounded by stays."""
    given, exact = inputs(dtype), inputs(dtype)
    given[1].grad_dtype = torch.float32
    losses = chunked(*given, chunk_tokens=1, fused=fused)
    losses.sum().backward()
    wide = [each.detach().double().requires_grad_() for each in exact[:2]]
    plain(*wide, *exact[2:]).sum().backward()
    assert losses.dtype == given[1].grad.dtype == torch.float32
    rtol = CHUNKED_RTOL[dtype]
    assert_close(given[1].grad, wide[1].grad, rtol=rtol, what="gradient of the weight")
    assert_close(given[0].grad, wide[0].grad, rtol=rtol, what="gradient of the hidden states")


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of a tensor that is computed."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("fused", FORMS, ids=["plain", "fused"])
def test_no_more_logits_exist_than_those_of_a_chunk(fused):
    given = inputs()
    with Largest() as largest:
        chunked(*given, chunk_tokens=4, fused=fused).sum().backward()
    assert largest.elements == VOCABULARY * HIDDEN > 4 * VOCABULARY
