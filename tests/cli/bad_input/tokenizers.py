"""Damaged and unfit tokenizers: megalite tokenizer, and those that a preparation or a run is given."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

from tests.cli.bad_input.case import Case, prepare, train, write
from tests.support.tiny import tiny_corpus

SAVE_AGAIN = "save it again with save_pretrained"
COPY_AGAIN = "copy or download it again"


def preparing(world: Path) -> list[str]:
    return prepare(world, "text.jsonl")


def with_tokenizer(spoil: Callable[[Path], object], *flags: str) -> Callable[[Path], list[str]]:
    """A preparation with the world's tokenizer after `spoil`."""

    def make(world: Path) -> list[str]:
        spoil(world / "tok" / "tokenizer.json")
        return prepare(world, "text.jsonl", *flags)

    return make


def given(content: str | bytes) -> Callable[[Path], list[str]]:
    return with_tokenizer(
        lambda file: file.write_bytes(content if isinstance(content, bytes) else content.encode())
    )


def altered(**changes: Any) -> Callable[[Path], list[str]]:
    """The tokenizer.json with other values at its top."""
    return with_tokenizer(lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes)))


def convert(**files: str | bytes) -> Callable[[Path], list[str]]:
    """The conversion of a folder of these files, "_" standing for the point."""

    def make(world: Path) -> list[str]:
        for name, content in files.items():
            write(world, f"given/{'.'.join(name.rsplit('_', 1))}", content)
        return ["tokenizer", "convert", str(world / "given"), "--output", str(world / "made")]

    return make


def sentencepiece_model(**options: Any) -> bytes:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_corpus()),
        model_writer=model,
        vocab_size=100,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return model.getvalue()


def spoiled_model(
    spoil: Callable[[bytes], bytes] = bytes, *flags: str, **options: Any
) -> Callable[[Path], list[str]]:
    def make(world: Path) -> list[str]:
        write(world, "spm.model", spoil(sentencepiece_model(**options)))
        return ["tokenizer", "convert", str(world / "spm.model"), "--output", str(world / "made"), *flags]

    return make


def training(*flags: str, source: str = "text.txt", output: str = "made") -> Callable[[Path], list[str]]:
    def make(world: Path) -> list[str]:
        write(world, "empty.txt", "")
        command = ["tokenizer", "train", "--source", str(world / source), "--output", str(world / output)]
        return [*command, *([] if "--vocab-size" in flags else ["--vocab-size", "300"]), *flags]

    return make


def model_of_a_run(world: Path) -> list[str]:
    write(world, "spm.model", b"\x0a\xff")
    return train(world, tokenizer__path=str(world / "spm.model"), data__source=str(world / "text.txt"))


GPT2 = {
    "vocab_json": json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}),
    "merges_txt": "#version: 0.2\na b\n",
}

CASES = [
    Case(
        "no such tokenizer",
        lambda world: prepare(world, "text.jsonl", "--tokenizer", str(world / "no")),
        ("no does not exist", "megalite tokenizer train"),
    ),
    Case(
        "a folder without a tokenizer",
        with_tokenizer(lambda file: file.rename(file.with_name("vocab.txt"))),
        ("tok has no tokenizer.json (it has ['vocab.txt'])", "save_pretrained"),
    ),
    Case(
        "an empty folder",
        with_tokenizer(lambda file: file.unlink()),
        ("tok has no tokenizer.json", "save_pretrained"),
    ),
    Case("an empty tokenizer.json", given(""), ("tokenizer.json is not a tokenizer", "save it again")),
    Case(
        "bytes in place of a tokenizer.json",
        given(b"\xff\xfe\x00"),
        ("tokenizer.json is not a tokenizer", "save it again"),
    ),
    Case(
        "half a tokenizer.json",
        with_tokenizer(lambda file: file.write_bytes(file.read_bytes()[:500])),
        ("tokenizer.json is not a tokenizer", "save it again"),
    ),
    Case(
        "a list in place of a tokenizer",
        given("[1, 2]"),
        ("tokenizer.json is not a tokenizer", "save it again"),
    ),
    Case("a tokenizer of nothing", given("{}"), ("tokenizer.json is not a tokenizer", "save it again")),
    Case(
        "a model of another kind",
        altered(model={"type": "Other", "vocab": {}}),
        ("tokenizer.json is not a tokenizer", "save it again"),
    ),
    Case(
        "a model without words",
        altered(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]),
        ("tokenizer.json has no token '<|endoftext|>'", "--end-of-document"),
    ),
    Case(
        "merges of unknown words",
        altered(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
        ("tokenizer.json is not a tokenizer", "save it again"),
    ),
    Case(
        "no such end of a document",
        with_tokenizer(bool, "--end-of-document", "</s>"),
        ("tokenizer.json has no token '</s>'", "--end-of-document", "<|endoftext|>"),
    ),
    Case(
        "a .model of garbage",
        convert(tokenizer_model=b"\x0a\xff\xff"),
        ("tokenizer.model is not a sentencepiece model", COPY_AGAIN),
    ),
    Case(
        "an empty .model",
        convert(tokenizer_model=b""),
        ("tokenizer.model is not a sentencepiece model", COPY_AGAIN),
    ),
    Case(
        "a .model that is text",
        convert(tokenizer_model="not a model"),
        ("tokenizer.model is not a sentencepiece model", COPY_AGAIN),
    ),
    Case(
        "half a .model",
        spoiled_model(lambda model: model[: len(model) // 2]),
        ("spm.model is not a sentencepiece model", COPY_AGAIN),
    ),
    Case(
        "a .model without the end of a document",
        spoiled_model(bytes, "--end-of-document", "<|endoftext|>"),
        ("spm.model has no token '<|endoftext|>'", "--end-of-document", "</s>"),
    ),
    Case(
        "a .model of whole words",
        spoiled_model(bytes, "--end-of-document", "</s>", model_type="word"),
        ("spm.model splits into whole words", "use another tokenizer"),
    ),
    Case(
        "a .model with spaces behind words",
        spoiled_model(bytes, "--end-of-document", "</s>", treat_whitespace_as_suffix=True),
        ("spm.model writes spaces behind words", "use another tokenizer"),
    ),
    Case(
        "a .model that is not there",
        lambda world: ["tokenizer", "convert", str(world / "no.model"), "--output", str(world / "made")],
        ("no.model cannot be read", "check its path"),
    ),
    Case(
        "a .vocab alone",
        lambda world: [
            "tokenizer",
            "convert",
            str(world / write(world, "spm.vocab", "a\t0\n")),
            "--output",
            str(world / "made"),
        ],
        ("spm.vocab has the pieces only", "name the sentencepiece .model"),
    ),
    Case(
        "a vocab.json that is no JSON",
        convert(**{**GPT2, "vocab_json": "{"}),
        ("vocab.json is not JSON", COPY_AGAIN),
    ),
    Case(
        "a vocab.json that is a list",
        convert(**{**GPT2, "vocab_json": "[]"}),
        ("vocab.json is not a JSON object", COPY_AGAIN),
    ),
    Case(
        "a vocab.json of texts",
        convert(**{**GPT2, "vocab_json": '{"<|endoftext|>": "a"}'}),
        ("do not fit each other", "copy both again"),
    ),
    Case(
        "merges of other words",
        convert(**{**GPT2, "merges_txt": "x y\n"}),
        ("merges.txt and vocab.json do not fit each other", "copy both again"),
    ),
    Case(
        "merges in a wrong form",
        convert(**{**GPT2, "merges_txt": "a b c\n"}),
        ("merges.txt and vocab.json do not fit each other", "copy both again"),
    ),
    Case(
        "a vocabulary without the end of a document",
        convert(**{**GPT2, "vocab_json": '{"a": 0}'}),
        ("vocab.json has no token '<|endoftext|>'", "--end-of-document"),
    ),
    Case(
        "another class's vocabulary",
        convert(**GPT2, tokenizer_config_json='{"tokenizer_class": "BertTokenizer"}'),
        ("the vocabulary of a BertTokenizer", "AutoTokenizer"),
    ),
    Case(
        "a vocab.json without merges.txt",
        convert(vocab_json=GPT2["vocab_json"]),
        ("given has no tokenizer.json (it has ['vocab.json'])", "save_pretrained"),
    ),
    Case(
        "a configuration that is no JSON",
        lambda world: (
            write(world, "tok/tokenizer_config.json", "{"),
            ["tokenizer", "convert", str(world / "tok"), "--output", str(world / "made")],
        )[1],
        ("tokenizer_config.json is not a tokenizer's configuration", "save it again"),
    ),
    Case(
        "no text to train on",
        training(source="empty.txt"),
        ("--source: ", "empty.txt has no text", "name a source"),
    ),
    Case(
        "no text to train sentencepiece on",
        training("--kind", "unigram", source="empty.txt"),
        ("--source: ", "empty.txt has no text", "name a source"),
    ),
    Case(
        "a vocabulary without room for bytes",
        training("--vocab-size", "100"),
        ("vocabulary size 100 has no room for 256 bytes", "use at least 257"),
    ),
    Case(
        "a vocabulary below nothing",
        training("--vocab-size", "-5"),
        ("vocabulary size -5", "use at least 257"),
    ),
    Case(
        "more words than the text has",
        training("--vocab-size", "50000"),
        ("for a vocabulary of", "not 50000", "--vocab-size"),
    ),
    Case(
        "more pieces than the text has",
        training("--vocab-size", "50000", "--kind", "unigram"),
        ("for a vocabulary of", "not 50000", "--vocab-size"),
    ),
    Case(
        "a training over another tokenizer",
        training(output="tok"),
        ("tok/tokenizer.json exists and would be replaced", "--overwrite"),
    ),
    Case(
        "a conversion over another tokenizer",
        lambda world: ["tokenizer", "convert", str(world / "tok"), "--output", str(world / "tok")],
        ("tok/tokenizer.json exists and would be replaced", "--overwrite"),
    ),
    Case(
        "a tokenizer below a file",
        training(output="text.txt/made"),
        ("text.txt", "cannot be written", "choose another folder"),
    ),
    Case(
        "an end of nothing",
        training("--end-of-document", ""),
        ("--end-of-document", "the token is empty", "name one"),
    ),
    Case("a run's .model of garbage", model_of_a_run, ("spm.model is not a sentencepiece model", COPY_AGAIN)),
    Case(
        "a run's tokenizer that is not there",
        lambda world: train(world, tokenizer__path=str(world / "no")),
        ('no" does not exist', "megalite tokenizer train"),
    ),
]
