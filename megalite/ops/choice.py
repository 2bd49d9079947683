"""Which implementation of each operator a model uses: one name for each, chosen before the model is built."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TORCH = "torch"
COMPILED = "megalite"
"""The library that setup.py builds from csrc/."""

# What a model asks for by name, in words.
NAMES = {
    "norm": "RMSNorm, LayerNorm",
    "add_norm": "residual add + norm",
    "rotary": "rotary embedding",
    "glu": "SwiGLU, GeGLU",
    "bias_gelu": "bias + GELU",
    "cross_entropy": "cross entropy",
    "attention": "causal attention",
    "attention_windows": "attention in a sliding window",
    "attention_documents": "attention within documents",
    "attention_dropout": "attention with dropout",
    "attention_softcap": "soft-capped attention",
    "adamw": "AdamW and the rounded weights",
    "sum_of_squares": "gradient norm",
    "accumulate": "gradient sums in float32",
}


@dataclass(frozen=True)
class Operators:
    """The implementation of each operator of NAMES; torch where none is given."""

    chosen: Mapping[str, str] = field(default_factory=dict, hash=False)

    def of(self, operator: str) -> str:
        """The implementation's name. Raises KeyError for an operator that does not exist."""
        if operator not in NAMES:
            raise KeyError(operator)
        return self.chosen.get(operator, TORCH)

    def uses(self, operator: str, implementation: str = COMPILED) -> bool:
        """Whether this implementation is the chosen one."""
        return self.of(operator) == implementation

    @classmethod
    def all(cls, implementation: str, operators: Iterable[str] = NAMES) -> "Operators":
        """One implementation for all of these operators."""
        return cls(dict.fromkeys(operators, implementation))


PLAIN_TORCH = Operators()
ALL_COMPILED = Operators.all(COMPILED)


def attention_operator(*, dropout: bool, softcap: bool, documents: bool, window: bool) -> str:
    """The operator of NAMES that computes attention of this form: dropout counts before a soft cap before documents
    before a window."""
    if dropout:
        return "attention_dropout"
    if softcap:
        return "attention_softcap"
    if documents:
        return "attention_documents"
    return "attention_windows" if window else "attention"
