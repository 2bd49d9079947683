"""Megatron-LM's arguments of text, tokenizer, validation and folders."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from megalite.convert.adopt.continued import answer_output, answer_resume, begins_anew
from megalite.convert.adopt.rules import Reading, number, text, whole

DEFAULT_SPLIT = [969.0, 30.0, 1.0]
_EVERY, _ITERATIONS = 1000, 100
_ORDER = "the samples of .bin/.idx files as Megatron-LM draws them; megalite has an order of its own"


def read_data(reading: Reading, key: str, value: Any) -> None:
    words = value if isinstance(value, list) else str(value).split()
    if key == "train-data-path" and reading.has("data-path"):
        raise ValueError("stands beside --data-path")
    weights, sources = _weighted(words)
    if key == "valid-data-path":
        note = "the weights of validation texts have no effect: each has its own loss" if weights else ""
        report = reading.change if weights else reading.take
        report(key, {"data.validation": sources if len(sources) > 1 else sources[0]}, note)
    elif len(sources) == 1:
        reading.take(key, {"data.source": sources[0]})
    elif weights:
        blend = [
            {"source": source, "weight": weight} for source, weight in zip(sources, weights, strict=True)
        ]
        reading.take(key, {"data.blend": blend})
    else:
        remedy = "write the weights: --data-path 0.5 A 0.5 B"
        reading.refuse(key, "megalite blends texts by weights, and there are none", remedy)


def _weighted(words: Sequence[str]) -> tuple[list[float], list[str]]:
    """Return the weights (none where there are none) and the paths of a list of data. Raises ValueError."""
    try:
        weights = [number(word) for word in words[::2]]
    except ValueError:
        weights = []
    if not weights or len(words) % 2:
        if not words:
            raise ValueError("names no text")
        return [], list(words)
    return weights, list(words[1::2])


def read_split(reading: Reading, key: str, value: Any) -> None:
    if not reading.has("data-path"):
        reading.no_effect(key, "it splits --data-path alone")
        return
    parts = value if isinstance(value, list) else [value]
    shares = [
        number(part) for part in "".join(map(str, parts)).strip("'\"").replace("/", ",").split(",") if part
    ]
    if not 1 <= len(shares) <= 3 or sum(shares) <= 0 or min(shares) < 0:
        raise ValueError(f"{value!r} is no split of at most three shares")
    reading.take(key, {"data.split": shares})


def read_document_mask(reading: Reading, key: str, value: Any) -> None:
    """--reset-attention-mask and --reset-position-ids: rotary positions need no reset where attention has one."""
    masked, reset = reading.is_on("reset-attention-mask"), reading.is_on("reset-position-ids")
    masked = masked or reading.is_on("dataloader-inter-document-masking")
    rotary = reading.is_on("use-rotary-position-embeddings") or reading.get("position-embedding-type") in (
        "rope",
        "rotary",
    )
    names = ("reset-attention-mask", "reset-position-ids", "dataloader-inter-document-masking")
    if masked and (reset or rotary):
        for name in names:
            reading.take(name, {"data.document_mask": True})
        return
    why = (
        "positions restart and attention does not"
        if reset
        else "attention restarts and learned positions do not"
    )
    for name in names:
        if reading.has(name):
            reading.refuse(
                name, f"{why}; data.document_mask does both", "set data.document_mask, or leave it out"
            )


def read_validation(reading: Reading, key: str, value: Any) -> None:
    count = whole(value)
    if reading.has("split") and "split" not in reading.answered:
        read_split(reading, "split", reading.get("split"))
    silent = DEFAULT_SPLIT if reading.has("data-path") and not reading.has("split") else [1.0]
    split = reading.account.settings.get("data.split", silent)
    has_text = reading.has("valid-data-path") or (len(split) > 1 and split[1] > 0)
    if not has_text or not whole(reading.get("eval-iters", 100)):
        reading.no_effect(key, "no text is left for validation" if not has_text else "--eval-iters is 0")
    elif key == "eval-interval":
        reading.take(key, {"validation.every": count})
    elif reading.has("global-batch-size"):
        samples = count * whole(reading.get("global-batch-size"))
        reading.take(key, {"validation.samples": samples}, "sequences: iterations * global batch")
    else:
        raise ValueError("counts global batches, and --global-batch-size is not given")


def read_tokenizer(reading: Reading, key: str, value: Any) -> None:
    kind, model = reading.get("tokenizer-type"), reading.get("tokenizer-model")
    if kind in (
        "NullTokenizer",
        "NullMultimodalTokenizer",
        "TikTokenizer",
        "MultimodalTokenizer",
        "SFTTokenizer",
    ):
        reading.refuse("tokenizer-type", "megalite has no such tokenizer", "set tokenizer.path")
        model = None
    elif kind and kind.startswith("Bert"):
        reading.refuse("tokenizer-type", "is for BERT", "set tokenizer.path")
    if model is not None and (kind is None or kind != "GPT2BPETokenizer"):
        reading.take("tokenizer-model", {"tokenizer.path": text(model)})
    vocabulary = reading.get("vocab-file")
    if vocabulary is not None and model is None:
        folder = str(PurePosixPath(text(vocabulary)).parent)
        note = "a folder with vocab.json and merges.txt: copy the two files there under these names"
        named = PurePosixPath(vocabulary).name == "vocab.json"
        for name in ("vocab-file", "merge-file"):
            report = reading.take if named else reading.change
            report(name, {"tokenizer.path": folder}, "" if named else note)
    for name in ("tokenizer-type", "tokenizer-model", "vocab-file", "merge-file"):
        reading.no_effect(name, "the kind of tokenizer is read from its files")


def read_save_and_load(reading: Reading, key: str, value: Any) -> None:
    if key == "save":
        answer_output(reading, key, value)
    elif key == "load" and not begins_anew(reading, value, reading.get("save"), "no-load-optim"):
        answer_resume(reading, key, text(value), reading.get("save"))
    else:
        remedy = f"megalite convert export {value} FOLDER, then set model.weights to FOLDER"
        reading.refuse(key, "a new run begins from another program's weights", remedy)


def read_vocabulary(reading: Reading, key: str, value: Any) -> None:
    if key == "padded-vocab-size":
        reading.take(key, {"model.vocab_size": whole(value)})
    elif key == "make-vocab-size-divisible-by" and value not in ("1", 1):
        note = "megalite pads no vocabulary, so that the softmax has no padding rows"
        reading.change(key, {}, note)
    else:
        reading.no_effect(key, "the vocabulary is the tokenizer's")


def data_defaults(reading: Reading) -> None:
    """Set the order of samples, and what it needs where the script is silent: the split and validation's length."""
    account, settings = reading.account, reading.account.settings
    if "data.source" not in settings and "data.blend" not in settings:
        return
    account.default("data.order", "megatron", _ORDER)
    if reading.has("data-path"):
        account.default("data.split", DEFAULT_SPLIT, "Megatron-LM's default of --split; no split here")
    split = settings.get("data.split", [1.0])
    if "data.validation" not in settings and not any(split[1:2]):
        return
    account.default("validation.every", _EVERY, "Megatron-LM's default of --eval-interval")
    if "training.global_batch_size" in settings:
        off = reading.get("eval-iters") == "0"
        iterations = 1 if off else _ITERATIONS
        reason = (
            "the least there is: --eval-iters is 0"
            if off
            else "Megatron-LM's default of --eval-iters * batch"
        )
        account.default("validation.samples", iterations * settings["training.global_batch_size"], reason)
