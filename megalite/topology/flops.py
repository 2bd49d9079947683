"""The floating point operations of a model, layer by layer. No torch.

Source: Kaplan et al., "Scaling laws for neural language models", 2020, section 2.1; Chowdhery et al., "PaLM", 2022,
appendix B.
"""

from dataclasses import dataclass

from megalite.topology.experts import EXPERT_AXIS, MixtureShape
from megalite.topology.parameters import EMBEDDING, POSITIONS, Parameter, model_parameters
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class ForwardFlops:
    """The operations of the forward of one token; a backward takes twice as many.

    layers: of each decoder layer: 2 per matrix parameter, and 4 x attention width x mean number of keys. head: of the
    rest, which is the product with the vocabulary.
    """

    layers: tuple[int, ...]
    head: int


def forward_flops(shape: ModelShape, sequence_length: int) -> ForwardFlops:
    """Return the operations of a token in sequences of this length; a look-up in the embedding is none.

    The mean number of keys is half the sequence length, and less with a sliding window; virtual tokens of a prefix add
    to it. A prefix itself is computed once a micro batch, which does not count.
    """
    layers = attention_flops(shape, sequence_length)
    head = 0
    for parameter in model_parameters(shape):
        if not _multiplies(parameter, shape):
            continue
        if parameter.layer is None:
            head += 2 * parameter.numel
        else:
            layers[parameter.layer] += 2 * active_numel(parameter, shape)
    return ForwardFlops(tuple(layers), head)


def attention_flops(shape: ModelShape, sequence_length: int) -> list[int]:
    """Return the operations of a token's products with keys and values in each layer, forward."""
    return [
        shape.score_values * (_twice_seen(shape.window_of(layer), sequence_length) + 2 * shape.prefix_tokens)
        for layer in range(shape.num_hidden_layers)
    ]


def flops_per_token(shape: ModelShape, sequence_length: int) -> int:
    """Return the operations of the forward and backward of one token; a frozen weight has no gradient."""
    forward = forward_flops(shape, sequence_length)
    frozen = 2 * sum(
        active_numel(parameter, shape)
        for parameter in model_parameters(shape)
        if not parameter.trained and _multiplies(parameter, shape)
    )
    return 3 * (sum(forward.layers) + forward.head) - frozen


def active_numel(parameter: Parameter, shape: ModelShape) -> int:
    """Return how many values of a parameter a token meets: those of the experts that it is sent to, or all."""
    if parameter.spec.axis != EXPERT_AXIS or not isinstance(shape, MixtureShape) or shape.experts is None:
        return parameter.numel
    return parameter.numel // shape.experts.num_experts * shape.experts.num_experts_per_tok


def _multiplies(parameter: Parameter, shape: ModelShape) -> bool:
    """Return whether every token is multiplied with the parameter: it is a matrix, and no table or prefix."""
    table = parameter.name == POSITIONS or (parameter.name == EMBEDDING and not shape.tie_word_embeddings)
    prefix = parameter.adapter and bool(shape.prefix_tokens)
    return len(parameter.spec.full_shape) == 2 and not table and not prefix


def _twice_seen(window: int | None, length: int) -> int:
    """Return twice the mean number of keys per token."""
    window = length if window is None else min(window, length)
    return 2 * window - window * window // length
