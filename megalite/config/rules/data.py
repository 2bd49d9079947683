"""The rules over [tokenizer] and [data]: where text and tokenizer come from, how sets are mixed and divided."""

from collections.abc import Iterator, Sequence

from megalite.config.toml import shown
from megalite.config.validate import Facts
from megalite.errors import Problem

_LARGEST_ERROR = 1e-6


def tokenizer_is_given_once(facts: Facts) -> Iterator[Problem]:
    path, size = facts.tokenizer.path, facts.tokenizer.vocab_size
    if path is not None and size is not None:
        message = f"{size} is for training a tokenizer, and tokenizer.path names one"
        yield Problem("tokenizer.vocab_size", message, "set one of the two")
    elif path is None and size is None and facts.data.source == "stdlib":
        message = "no tokenizer is named and none is to be trained"
        yield Problem("tokenizer.vocab_size", message, "set it, or tokenizer.path")


def model_holds_every_token(facts: Facts) -> Iterator[Problem]:
    rows, ids = facts.model.vocab_size, facts.tokenizer.vocab_size
    if rows != "auto" and ids is not None and rows < ids:
        message = f"{rows} is less than tokenizer.vocab_size = {ids}"
        yield Problem("model.vocab_size", message, f'use {ids} or more, or "auto"')


def text_is_given_once(facts: Facts) -> Iterator[Problem]:
    source, blend = facts.data.source, facts.data.blend
    if source is None and blend is None:
        yield Problem("data.source", "is required", "name a text, or several by weight in [[data.blend]]")
    elif source is not None and blend is not None:
        remedy = "name its text in the blend, or leave that out"
        yield Problem("data.source", "stands beside [[data.blend]]", remedy)
    elif blend is not None and not blend:
        yield Problem("data.blend", "names no set", "add one with source and weight")


def blend_weights_are_positive(facts: Facts) -> Iterator[Problem]:
    for number, part in enumerate(facts.data.blend or (), start=1):
        if part.weight <= 0:
            message = f"{part.weight:g} is not above 0"
            yield Problem(
                f"data.blend[{number}].weight", message, "set its share of the samples, or leave the set out"
            )


def blend_names_each_set_once(facts: Facts) -> Iterator[Problem]:
    seen: dict[tuple[object, ...], int] = {}
    for number, part in enumerate(facts.data.blend or (), start=1):
        first = seen.setdefault((part.source, part.text_column, part.pattern), number)
        if first != number:
            message = f"{shown(part.source)} is set {first} already"
            yield Problem(
                f"data.blend[{number}].source", message, "name it once, with the sum of the weights"
            )


def split_shares_add_up(facts: Facts) -> Iterator[Problem]:
    wrong = wrong_shares(facts.data.split) if facts.data.split is not None else None
    if wrong is not None:
        yield Problem("data.split", *wrong)


def wrong_shares(shares: Sequence[float]) -> tuple[str, str] | None:
    """What is wrong with the shares of a split, and the remedy."""
    if not 1 <= len(shares) <= 3:
        wrong = f"has {len(shares)} shares, not 2 or 3"
    elif min(shares) < 0:
        wrong = "has a share below 0"
    elif shares[0] == 0:
        wrong = "leaves nothing to train on"
    elif not abs(sum(shares) - 1) <= _LARGEST_ERROR:  # nor nan
        wrong = f"adds up to {sum(shares):g}, not 1"
    else:
        return None
    remedy = "write for example [0.98, 0.01, 0.01]: of the documents for training, validation and test"
    return f"[{', '.join(f'{share:g}' for share in shares)}] {wrong}", remedy


def validation_is_other_text(facts: Facts) -> Iterator[Problem]:
    validation, split = facts.data.validation, facts.data.split
    if validation is None:
        return
    if split is not None and len(split) > 1 and split[1] > 0:
        message = f"{split[1]:g} of the documents would validate, and data.validation names others"
        yield Problem("data.split", message, "set one of the two, or its second share to 0")
    trained = [facts.data.source, *(part.source for part in facts.data.blend or ())]
    if validation in trained:
        yield Problem(
            "data.validation",
            f"{shown(validation)} is what is trained on",
            "name other text, or set data.split",
        )


def every_loader_worker_has_a_step(facts: Facts) -> Iterator[Problem]:
    workers, steps = facts.data.loader_workers, facts.data.prefetch
    if workers > steps:
        message = f"{workers} threads have {steps} steps to read ahead (data.prefetch)"
        yield Problem("data.loader_workers", message, f"use at most {steps}, or raise data.prefetch")


DATA_RULES = (
    tokenizer_is_given_once,
    model_holds_every_token,
    text_is_given_once,
    blend_weights_are_positive,
    blend_names_each_set_once,
    split_shares_add_up,
    validation_is_other_text,
    every_loader_worker_has_a_step,
)
