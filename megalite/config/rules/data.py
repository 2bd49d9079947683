"""Rules over [tokenizer] and [data]: source of text and tokenizer, blending, and the split of documents."""

from collections.abc import Iterator, Sequence

from megalite.config.facts import Facts
from megalite.config.text_sections import DataConfig
from megalite.config.toml import shown
from megalite.errors import Problem

_LARGEST_ERROR = 1e-6


def tokenizer_is_given_once(facts: Facts) -> Iterator[Problem]:
    path, size = facts.tokenizer.path, facts.tokenizer.vocab_size
    if path is not None and size != "auto":
        message = f"{size} trains a new tokenizer, but tokenizer.path names an existing one"
        yield Problem("tokenizer.vocab_size", message, "set only one of them")


def tokens_are_added_to_a_tokenizer(facts: Facts) -> Iterator[Problem]:
    added = facts.tokenizer.add_tokens
    if added and facts.tokenizer.path is None:
        remedy = "set tokenizer.path, or delete the setting: a new tokenizer has ids for every text"
        yield Problem("tokenizer.add_tokens", "needs an existing tokenizer", remedy)
    if repeated := {each for each in added if added.count(each) > 1}:
        yield Problem("tokenizer.add_tokens", f"names {shown(min(repeated))} twice", "name every token once")


def model_holds_every_token(facts: Facts) -> Iterator[Problem]:
    rows, ids = facts.model.vocab_size, facts.tokenizer.vocab_size
    if rows != "auto" and ids != "auto" and rows < ids:
        message = f"{rows} is less than tokenizer.vocab_size = {ids}"
        yield Problem("model.vocab_size", message, f'use {ids} or more, or "auto"')


def text_is_given_once(facts: Facts) -> Iterator[Problem]:
    source, blend = facts.data.source, facts.data.blend
    if source is None and blend is None:
        yield Problem(
            "data.source", "is required", "name a text file, or several texts with weights in [[data.blend]]"
        )
    elif source is not None and blend is not None:
        remedy = "move its text into [[data.blend]], or delete the blend"
        yield Problem("data.source", "is set together with [[data.blend]]", remedy)
    elif blend is not None and not blend:
        yield Problem("data.blend", "is empty", "add a [[data.blend]] table with source and weight")


def blend_weights_are_positive(facts: Facts) -> Iterator[Problem]:
    for number, part in enumerate(facts.data.blend or (), start=1):
        if part.weight <= 0:
            message = f"{part.weight:g} is not greater than 0"
            yield Problem(
                f"data.blend[{number}].weight", message, "use a positive weight, or delete this table"
            )


def blend_names_each_set_once(facts: Facts) -> Iterator[Problem]:
    seen: dict[tuple[object, ...], int] = {}
    for number, part in enumerate(facts.data.blend or (), start=1):
        first = seen.setdefault((part.source, part.text_column, part.pattern), number)
        if first != number:
            message = f"{shown(part.source)} is also the source of data.blend[{first}]"
            yield Problem(
                f"data.blend[{number}].source", message, "name it once, with the sum of the weights"
            )


def split_shares_add_up(facts: Facts) -> Iterator[Problem]:
    wrong = wrong_shares(facts.data.split) if facts.data.split is not None else None
    if wrong is not None:
        yield Problem("data.split", *wrong)


def wrong_shares(shares: Sequence[float]) -> tuple[str, str] | None:
    """Return (what is wrong with the shares of a split, the remedy); None if they are valid."""
    if not 1 <= len(shares) <= 3:
        wrong = f"has {len(shares)} shares, not 2 or 3"
    elif min(shares) < 0:
        wrong = "has a share below 0"
    elif shares[0] == 0:
        wrong = "has no share for training"
    elif not abs(sum(shares) - 1) <= _LARGEST_ERROR:  # true for nan too
        wrong = f"adds up to {sum(shares):g}, not 1"
    else:
        return None
    remedy = "write for example [0.98, 0.01, 0.01] for training, validation and test"
    return f"[{', '.join(f'{share:g}' for share in shares)}] {wrong}", remedy


def validation_is_other_text(facts: Facts) -> Iterator[Problem]:
    validation, split = facts.data.validation, facts.data.split
    if validation is None:
        return
    if split is not None and len(split) > 1 and split[1] > 0:
        message = f"{split[1]:g} of the documents are for validation, but data.validation is set too"
        yield Problem("data.split", message, "set only one of them, or the second share to 0")
    trained = [facts.data.source, *(part.source for part in facts.data.blend or ())]
    if validation in trained:
        yield Problem(
            "data.validation",
            f"{shown(validation)} is also the training text",
            "name other text, or set data.split instead",
        )


def every_loader_worker_has_a_step(facts: Facts) -> Iterator[Problem]:
    workers, steps = facts.data.loader_workers, facts.data.prefetch
    if workers > steps:
        message = f"{workers} threads are more than the data.prefetch = {steps} steps that are read ahead"
        remedy = f"use at most {steps}, or data.prefetch {workers} or more"
        yield Problem("data.loader_workers", message, remedy)


def settings_of_conversations_need_some(facts: Facts) -> Iterator[Problem]:
    if facts.data.kind == "instruct":
        return
    fields, names = DataConfig.model_fields, ("train_on", "packing", "too_long")
    changed = [f"data.{name}" for name in names if getattr(facts.data, name) != fields[name].default]
    changed += ["tokenizer.chat_template"] if facts.tokenizer.chat_template is not None else []
    for key in changed:
        message = 'has no effect with data.kind = "text"'
        yield Problem(key, message, 'delete it, or set data.kind = "instruct"')


def conversations_have_no_settings_of_text(facts: Facts) -> Iterator[Problem]:
    if facts.data.kind == "text":
        return
    remedy = 'delete it, or set data.kind = "text"'
    if facts.data.text_column != "text":
        yield Problem("data.text_column", 'has no effect with data.kind = "instruct"', remedy)
    parts = facts.data.blend or ()
    for number, part in enumerate(parts, start=1):
        if part.text_column is not None:
            key = f"data.blend[{number}].text_column"
            yield Problem(key, 'has no effect with data.kind = "instruct"', remedy)


DATA_RULES = (
    tokenizer_is_given_once,
    tokens_are_added_to_a_tokenizer,
    model_holds_every_token,
    text_is_given_once,
    blend_weights_are_positive,
    blend_names_each_set_once,
    split_shares_add_up,
    validation_is_other_text,
    every_loader_worker_has_a_step,
    settings_of_conversations_need_some,
    conversations_have_no_settings_of_text,
)
