"""Rules over [tokenizer] and [data]: source of text and tokenizer, blending, and the split of documents."""

from collections.abc import Iterator, Sequence

from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.text_sections import DataConfig
from megalite.config.sections.toml import shown
from megalite.errors import Problem

_LARGEST_ERROR = 1e-6


def tokenizer_is_given_once(run: CheckedRun) -> Iterator[Problem]:
    path, size = run.tokenizer.path, run.tokenizer.vocab_size
    if path is not None and size != "auto":
        message = f"{size} trains a new tokenizer, but tokenizer.path names an existing one"
        yield Problem.reset("tokenizer.vocab_size", message, "set only one of them")


def tokens_are_added_to_a_tokenizer(run: CheckedRun) -> Iterator[Problem]:
    added = run.tokenizer.add_tokens
    if added and run.tokenizer.path is None:
        remedy = "set tokenizer.path, or delete the setting: a new tokenizer has ids for every text"
        yield Problem.reset("tokenizer.add_tokens", "needs an existing tokenizer", remedy)
    if repeated := {each for each in added if added.count(each) > 1}:
        once = {"tokenizer.add_tokens": list(dict.fromkeys(added))}
        message = f"names {shown(min(repeated))} twice"
        yield Problem("tokenizer.add_tokens", message, "name every token once", once)


def model_holds_every_token(run: CheckedRun) -> Iterator[Problem]:
    rows, ids = run.model.vocab_size, run.tokenizer.vocab_size
    if rows != "auto" and ids != "auto" and rows < ids:
        message = f"{rows} is less than tokenizer.vocab_size = {ids}"
        yield Problem.reset("model.vocab_size", message, f'use {ids} or more, or "auto"', "auto")


def text_is_given_once(run: CheckedRun) -> Iterator[Problem]:
    source, blend = run.data.source, run.data.blend
    if source is None and blend is None:
        yield Problem(
            "data.source", "is required", "name a text file, or several texts with weights in [[data.blend]]"
        )
    elif source is not None and blend is not None:
        remedy = "move its text into [[data.blend]], or delete the blend"
        yield Problem("data.source", "is set together with [[data.blend]]", remedy, {"data.blend": None})
    elif blend is not None and not blend:
        yield Problem("data.blend", "is empty", "add a [[data.blend]] table with source and weight")


def blend_weights_are_positive(run: CheckedRun) -> Iterator[Problem]:
    blend, later = run.data.blend or (), run.data.curriculum
    for number, part in enumerate(blend, start=1):
        comes_later = any(each.weights[number - 1 : number] > (0.0,) for each in later)
        if part.weight < 0 or (part.weight == 0 and not comes_later):
            message = f"{part.weight:g} is not greater than 0"
            remedy = "use a positive weight, or delete this table"
            if part.weight == 0 and later:
                message, remedy = "0 in every step", "use a positive weight here or in data.curriculum"
            yield Problem(f"data.blend[{number}].weight", message, remedy)
    if blend and all(part.weight == 0 for part in blend):
        yield Problem("data.blend", "has the weight 0 in every table", "use a positive weight in one of them")


def curriculum_has_a_weight_for_each_set(run: CheckedRun) -> Iterator[Problem]:
    sets = len(run.data.blend or ())
    if run.data.curriculum and not sets:
        remedy = "name the data sets in [[data.blend]], or delete the curriculum"
        yield Problem.reset(
            "data.curriculum", "changes the weights of [[data.blend]], which is not set", remedy
        )
        return
    for number, part in enumerate(run.data.curriculum, start=1):
        key, weights = f"data.curriculum[{number}].weights", shown(part.weights)
        if len(part.weights) != sets:
            message = f"{weights} has {len(part.weights)}, but there are {sets} [[data.blend]] tables"
            yield Problem(key, message, "write one weight for each, in their order")
        elif min(part.weights) < 0:
            yield Problem(key, f"{weights} has a weight below 0", "use 0 to pause a data set")
        elif not any(part.weights):
            yield Problem(key, f"{weights} pauses every data set", "use a positive weight for one of them")


def curriculum_steps_rise(run: CheckedRun) -> Iterator[Problem]:
    before, steps = 1, run.training.steps
    for number, part in enumerate(run.data.curriculum, start=1):
        key = f"data.curriculum[{number}].step"
        if part.step <= before:
            earlier = f"data.curriculum[{number - 1}].step = {before}" if number > 1 else "the first step"
            message = f"{part.step} does not come after {earlier}"
            remedy = "sort the tables by step" if number > 1 else "set the first weights in [[data.blend]]"
            yield Problem(key, message, f"use {before + 1} or more, or {remedy}")
        elif steps is not None and part.step > steps:
            message = f"{part.step} is behind training.steps = {steps}"
            yield Problem(key, message, f"use {steps} or less, or more training.steps")
        before = max(before, part.step)


def blend_names_each_set_once(run: CheckedRun) -> Iterator[Problem]:
    seen: dict[tuple[object, ...], int] = {}
    for number, part in enumerate(run.data.blend or (), start=1):
        first = seen.setdefault((part.source, part.text_column, part.pattern), number)
        if first != number:
            message = f"{shown(part.source)} is also the source of data.blend[{first}]"
            yield Problem(
                f"data.blend[{number}].source", message, "name it once, with the sum of the weights"
            )


def split_shares_add_up(run: CheckedRun) -> Iterator[Problem]:
    split = run.data.split
    if split is not None and run.data.order == "megatron":
        # Megatron divides by the sum: 969,30,1 is the split of its examples.
        split = tuple(share / (sum(split) or 1.0) for share in split)
    wrong = wrong_shares(split) if split is not None else None
    if wrong is not None:
        yield Problem("data.split", *wrong, {"data.split": [0.98, 0.01, 0.01]})


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


def validation_is_other_text(run: CheckedRun) -> Iterator[Problem]:
    validation, split = run.data.validation, run.data.split
    if validation is None:
        return
    if split is not None and len(split) > 1 and split[1] > 0:
        message = f"{split[1]:g} of the documents are for validation, but data.validation is set too"
        yield Problem.reset("data.split", message, "set only one of them, or the second share to 0")
    trained = [run.data.source, *(part.source for part in run.data.blend or ())]
    if validation in trained:
        yield Problem(
            "data.validation",
            f"{shown(validation)} is also the training text",
            "name other text, or set data.split instead",
            {"data.validation": None, "data.split": [0.98, 0.02]},
        )


def every_loader_worker_has_a_step(run: CheckedRun) -> Iterator[Problem]:
    workers, steps = run.data.loader_workers, run.data.prefetch
    if workers > steps:
        message = f"{workers} threads are more than the data.prefetch = {steps} steps that are read ahead"
        remedy = f"use at most {steps}, or data.prefetch {workers} or more"
        yield Problem.reset("data.loader_workers", message, remedy, steps)


def settings_of_conversations_need_some(run: CheckedRun) -> Iterator[Problem]:
    kind = run.data.kind
    if kind == "instruct":
        return
    fields, names = DataConfig.model_fields, ["train_on", "packing", "length_buckets"]
    if kind == "text":
        names.append("too_long")
    changed = [f"data.{name}" for name in names if getattr(run.data, name) != fields[name].default]
    if kind == "text" and run.tokenizer.chat_template is not None:
        changed.append("tokenizer.chat_template")
    for key in changed:
        yield Problem.reset(
            key, f'has no effect with data.kind = "{kind}"', 'delete it, or set data.kind = "instruct"'
        )


def concatenated_conversations_have_any_length(run: CheckedRun) -> Iterator[Problem]:
    if run.data.packing == "concatenate" and run.data.too_long != "truncate":
        message = 'has no effect with data.packing = "concatenate", which cuts every conversation at the end of a row'
        yield Problem.reset("data.too_long", message, "delete it, or choose another data.packing")


def length_buckets_are_for_unpacked_conversations(run: CheckedRun) -> Iterator[Problem]:
    if not run.data.length_buckets or run.data.kind == "text":
        return
    if run.data.packing != "none":
        message = f'is for unpacked conversations, but data.packing is "{run.data.packing}"'
        yield Problem.reset("data.length_buckets", message, 'delete it, or set data.packing = "none"')
    if run.data.blend is not None:
        remedy = "delete it, or name all files as data.source"
        yield Problem.reset("data.length_buckets", "is for a single data set, not for [[data.blend]]", remedy)


def conversations_have_no_settings_of_text(run: CheckedRun) -> Iterator[Problem]:
    if run.data.kind == "text":
        return
    message = f'has no effect with data.kind = "{run.data.kind}"'
    remedy = 'delete it, or set data.kind = "text"'
    if run.data.text_column != "text":
        yield Problem.reset("data.text_column", message, remedy)
    parts = run.data.blend or ()
    for number, part in enumerate(parts, start=1):
        if part.text_column is not None:
            key = f"data.blend[{number}].text_column"
            yield Problem(key, message, remedy)
