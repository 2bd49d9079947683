"""The sizes that a calibration measures: of products, attention, models and collectives, on a CPU and on a card."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from megalite.planner.calibration import ProbeModel

_SMALLEST = ProbeModel(1, 16, 64, 64, 4, 5, 128)
_ADAPTED = replace(_SMALLEST, lora=16)


@dataclass(frozen=True)
class Probes:
    """tokens, features: the sizes of products, every tokens with every pair of features.

    attention: rows, length, heads, head_dim. models, variants: each is measured with one layer and with as many as it
    says. updated: a small and a large model for the optimizers; updated_slowly: for those that multiply matrices.
    steps: a small and a large model for whole steps, with one micro batch and with `micro_batches`. links: bytes.
    rounds: how often all of them are measured one after the other; the least time of each part counts.
    """

    tokens: Sequence[int]
    features: Sequence[int]
    attention: Sequence[tuple[int, int, int, int]]
    models: Sequence[ProbeModel]
    updated: Sequence[ProbeModel]
    updated_slowly: Sequence[ProbeModel]
    steps: Sequence[ProbeModel]
    links: Sequence[int]
    micro_batches: int = 4
    rounds: int = 1
    variants: Sequence[ProbeModel] = (_ADAPTED,)

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """Tokens, inputs, outputs."""
        return list(product(self.tokens, self.features, self.features))


ON_CPU = Probes(
    tokens=(64, 512),
    features=(16, 128, 512, 2048),
    attention=((4, 64, 8, 32), (4, 256, 8, 32), (2, 512, 8, 64), (1, 1024, 8, 32), (1, 1024, 8, 64)),
    models=(
        _SMALLEST,
        ProbeModel(1, 256, 256, 512, 8, 3, 2048),
        ProbeModel(2, 256, 256, 768, 8, 3, 8192),
        ProbeModel(1, 512, 512, 1024, 8, 3, 2048),
    ),
    updated=(_SMALLEST, ProbeModel(1, 16, 256, 768, 8, 4, 4096)),
    updated_slowly=(_SMALLEST, ProbeModel(1, 16, 256, 512, 8, 1, 128)),
    steps=(_SMALLEST, ProbeModel(1, 16, 256, 768, 8, 5, 1024)),
    links=(1 << 10, 1 << 16, 1 << 20, 1 << 23),
    variants=(_ADAPTED, replace(_SMALLEST, recomputed=True)),
    rounds=3,  # a shared machine is slow for some ten seconds at a time
)
ON_CARDS = Probes(
    tokens=(256, 2048, 16384),
    features=(64, 512, 2048, 8192),
    attention=((8, 512, 16, 64), (4, 2048, 16, 64), (4, 2048, 16, 128), (1, 8192, 16, 128)),
    models=(
        _SMALLEST,
        ProbeModel(1, 1024, 512, 2048, 8, 5, 8192),
        ProbeModel(4, 2048, 1024, 4096, 16, 5, 32768),
        ProbeModel(8, 2048, 2048, 5632, 16, 5, 32768),
    ),
    updated=(_SMALLEST, ProbeModel(1, 16, 2048, 5632, 16, 8, 32768)),
    updated_slowly=(_SMALLEST, ProbeModel(1, 16, 2048, 5632, 16, 1, 128)),
    steps=(_SMALLEST, ProbeModel(1, 16, 1024, 2816, 16, 5, 32768)),
    links=(1 << 12, 1 << 18, 1 << 22, 1 << 26, 1 << 28),
)


def step_settings(model: ProbeModel, micro_batches: int, zero: int, ranks: int) -> dict[str, object]:
    """Return the settings of a run that trains the model with `ranks` replicas."""
    return {
        "model.hidden_size": model.hidden,
        "model.intermediate_size": model.intermediate,
        "model.num_hidden_layers": model.layers,
        "model.num_attention_heads": model.heads,
        "model.num_key_value_heads": model.heads,
        "model.vocab_size": model.vocabulary,
        "model.tie_word_embeddings": "true",
        "training.sequence_length": model.length,
        "training.micro_batch_size": model.rows,
        "training.micro_batches": micro_batches,
        "training.steps": 1_000_000,
        "parallel.data": ranks,
        "data.source": "stdlib",
    } | ({"deepspeed.zero_optimization.stage": zero} if zero else {})
