"""Floating-point operations of a token by the conventions that people compare by.

megalite's convention is topology/flops.py: 6 per active matrix parameter, the head's included and the embedding's not,
and causal attention's 6 x layers x hidden x sequence. Others count all of attention's scores, and the products that
recomputation repeats.
"""

from dataclasses import dataclass

from megalite.config.sections.training_section import RecomputeMode
from megalite.topology.flops import attention_flops, flops_per_token, forward_flops
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class TokenOperations:
    """The operations of the forward and the backward of one token.

    model: megalite's convention. full_attention: as if every token saw the whole sequence, as Megatron-LM counts.
    hardware: the same with what recomputation repeats.
    """

    model: int
    full_attention: int
    hardware: int


def token_operations(
    shape: ModelShape, sequence_length: int, recompute: RecomputeMode = "none"
) -> TokenOperations:
    """Return the operations of a token in sequences of this length."""
    forward, model = forward_flops(shape, sequence_length), flops_per_token(shape, sequence_length)
    # The products of a token with all keys of the sequence, in all layers.
    scores = 2 * shape.num_hidden_layers * shape.score_values * sequence_length
    masked = scores - sum(attention_flops(shape, sequence_length))
    whole = model + 3 * masked
    again = {"none": 0, "selective": scores, "full": sum(forward.layers) + masked}[recompute]
    return TokenOperations(model, whole, whole + again)


def published_batch_operations(
    shape: ModelShape, sequence_length: int, sequences: int, recompute: RecomputeMode = "full"
) -> float:
    """Return the operations of a step by published formulas.

    full: 96 B s l h^2 (1 + s / 6h + V / 16 l h), Narayanan et al., "Efficient large-scale language model training on
    GPU clusters using Megatron-LM", 2021, equation 3. none: 72 B s l h^2 (1 + s / 6h + V / 12 l h), and selective:
    s / 3h in place of s / 6h, Korthikanti et al. 2022, appendix A. The last one counts the backward of attention's
    scores twice as well as their forward, which `token_operations` does not.
    """
    s, h, layers, rows = sequence_length, shape.hidden_size, shape.num_hidden_layers, shape.vocab_size
    if recompute == "full":
        return 96 * sequences * s * layers * h**2 * (1 + s / (6 * h) + rows / (16 * layers * h))
    scores = s / ((3 if recompute == "selective" else 6) * h)
    return 72 * sequences * s * layers * h**2 * (1 + scores + rows / (12 * layers * h))
