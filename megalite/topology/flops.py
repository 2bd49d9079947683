"""The floating point operations of a model, layer by layer. No torch.

Source: Kaplan et al., "Scaling laws for neural language models", 2020, section 2.1; Chowdhery et al., "PaLM", 2022,
appendix B.
"""

from dataclasses import dataclass

from megalite.topology.parameters import EMBEDDING, POSITIONS, model_parameters
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

    The mean number of keys is half the sequence length, and less with a sliding window.
    """
    width = shape.num_attention_heads * shape.head_dim
    layers = [
        2 * width * _twice_seen(shape.window_of(layer), sequence_length)
        for layer in range(shape.num_hidden_layers)
    ]
    head = 0
    for parameter in model_parameters(shape):
        looked_up = parameter.name == POSITIONS or (
            parameter.name == EMBEDDING and not shape.tie_word_embeddings
        )
        if len(parameter.spec.full_shape) < 2 or looked_up:
            continue
        if parameter.layer is None:
            head += 2 * parameter.numel
        else:
            layers[parameter.layer] += 2 * parameter.numel
    return ForwardFlops(tuple(layers), head)


def flops_per_token(shape: ModelShape, sequence_length: int) -> int:
    """Return the operations of the forward and backward of one token."""
    forward = forward_flops(shape, sequence_length)
    return 3 * (sum(forward.layers) + forward.head)


def _twice_seen(window: int | None, length: int) -> int:
    """Return twice the mean number of keys per token."""
    window = length if window is None else min(window, length)
    return 2 * window - window * window // length
