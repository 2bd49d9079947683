"""Rules and notes over how a step is computed: dropout, recompute, torch.compile."""

from collections.abc import Iterator

from megalite.config.validate import Facts


def notes_of(facts: Facts) -> list[str]:
    """What a run without problems should be told of its settings."""
    return [note for notes in NOTES for note in notes(facts)]


def attention_dropout_costs(facts: Facts) -> Iterator[str]:
    rate = facts.model.attention_dropout
    if rate > 0:
        yield (
            f"model.attention_dropout = {rate} has attention written out instead of fused: 3 to 5 times its "
            "time (measured on a CPU, sequences of 256 to 2048), and it keeps two values for each head and "
            "pair of tokens"
        )


NOTES = (attention_dropout_costs,)
