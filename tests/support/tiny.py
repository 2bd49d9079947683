"""The smallest model, tokens, text and tokenizer on which everything can go wrong that goes wrong on large ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.topology.parameters import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

SEQUENCE_LENGTH = 12
END_OF_DOCUMENT = "<|endoftext|>"


def tiny_shape(*, tied: bool = False, layers: int = 4) -> ModelShape:
    """Sizes that hide no mistake: a vocabulary that nothing divides, grouped key-value heads, no size twice.

    Fits tensor parallelism up to 4.
    """
    return ModelShape(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=76,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


@dataclass(frozen=True)
class TinyBatch:
    """Sequences of one global batch, [B, S] each; every sequence counts a different number of tokens."""

    input_ids: "Tensor"
    position_ids: "Tensor"
    labels: "Tensor"
    loss_mask: "Tensor"


def tiny_batch(
    shape: ModelShape, sequences: int, *, sequence_length: int = SEQUENCE_LENGTH, step: int = 0
) -> TinyBatch:
    """A pure function of its arguments. Row r has about (r + 1) / sequences of its tokens counted, at least one,
    and every third row ends in two ignored labels (-100)."""
    import torch

    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(shape.vocab_size, (sequences, sequence_length + 1), generator=generator)
    counted = torch.linspace(1, sequence_length, sequences).round().unsqueeze(1)
    order = torch.rand(sequences, sequence_length, generator=generator).argsort(dim=1)
    labels = ids[:, 1:].clone()
    labels[::3, -2:] = -100
    positions = torch.arange(sequence_length).repeat(sequences, 1)
    return TinyBatch(ids[:, :-1].contiguous(), positions, labels, (order < counted).float())


def tiny_corpus(documents: int = 40) -> list[str]:
    """Short texts with words that recur, so that a model learns within twenty steps, and bytes beyond ASCII."""
    subjects = ("the tensor", "a pipeline", "the gradient", "one rank", "das Maß", "每个阶段")
    verbs = ("waits for", "sends", "divides", "sums")
    objects = ("the weights", "a micro batch", "its peers", "nothing at all")
    return [
        " ".join(
            f"{subjects[(document + line) % 6]} {verbs[(document * line) % 4]} {objects[(document + 3 * line) % 4]}."
            for line in range(3 + document % 5)
        )
        + "\n"
        for document in range(documents)
    ]


def tiny_tokenizer(folder: Path, *, vocab_size: int = 384) -> Path:
    """A byte-level BPE tokenizer of `tiny_corpus`; the path of its tokenizer.json, written into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tiny_corpus(), trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
