"""Sentencepiece models: converted, they give sentencepiece's own ids, in `tokenizers` and in AutoTokenizer."""

import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as Backend

from megalite.data.tokenizers.sentencepiece_model import (
    PROBE_TEXTS,
    SentencePieceModel,
    convert_sentencepiece,
    read_sentencepiece,
    special_tokens,
)
from megalite.data.tokenizers.tokenizer import save_tokenizer
from megalite.errors import DataError
from tests.support.tiny import tiny_corpus

LINES = [
    *(line for text in tiny_corpus() for line in text.splitlines()),
    *(
        "spaces  and   more    spaces",
        "a < b > c / d",
        "x\ty",
        "caf\u00e9 e\u0301",
        "1 22 333",
        "aaaa aaa aa a",
    ),
]


def model(algorithm: str, vocab_size: int = 420, **options: Any) -> bytes:
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4),
        model_writer=written,
        model_type=algorithm,
        vocab_size=vocab_size,
        hard_vocab_limit=False,  # as many pieces as the text has
        minloglevel=2,
        **options,
    )
    return written.getvalue()


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
# The ways in which models in use differ: Llama 2, Gemma, T5 and mT5, XLNet-like.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {**IDENTITY, "byte_fallback": True, "allow_whitespace_only_pieces": True},
    "gemma": {
        **IDENTITY,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\t", "<tag>"],
    },
    "t5": {"vocab_size": 160},
    "bytes and nfkc": {"byte_fallback": True, "normalization_rule_name": "nfkc"},
    "symbols and a prefix": {**IDENTITY, "vocab_size": 160, "user_defined_symbols": ["<sep>", "the"]},
    "pieces of several words": {**IDENTITY, "byte_fallback": True, "split_by_whitespace": False},
    "no unknown, with padding": {"vocab_size": 160, "pad_id": 3, "bos_id": 4, "eos_id": 5, "unk_id": 0},
}
ALPHABET = "ab the e\u0301\u00e9<>/s0x1A\n\t\u1112\u1161\u11ab\ufe0f本🙂每个▁  "
HARD = st.text(st.sampled_from(ALPHABET), max_size=30)


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(VARIANTS))
def data(request: pytest.FixtureRequest, algorithm: str) -> bytes:
    return model(algorithm, **VARIANTS[request.param])


def ids(backend: Backend, text: str) -> list[int]:
    found: list[int] = backend.encode(text, add_special_tokens=False).ids
    return found


def test_every_text_has_sentencepieces_ids(data: bytes) -> None:
    backend, processor = convert_sentencepiece(data, "the model"), SentencePieceProcessor(model_proto=data)
    # Text spelled like a control symbol becomes that symbol by default, except in sentencepiece.
    backend.encode_special_tokens = True
    rng = random.Random(0)
    # nmt_nfkc makes a space of "▁", and `tokenizers` then drops a combining mark that follows.
    alphabet = ALPHABET.replace("▁", "")
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(25))) for _ in range(1500)]
    for text in [*PROBE_TEXTS, *tiny_corpus(), "a</s>b <s> <unk>", "x<0x0A>y <0xFF>", *texts]:
        assert ids(backend, text) == processor.encode(text), repr(text)
        if processor.unk_id() not in processor.encode(text):
            assert backend.decode(ids(backend, text)) == processor.decode(processor.encode(text))


def test_autotokenizer_gives_the_same_ids(data: bytes, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = SentencePieceProcessor(model_proto=data)
    backend = convert_sentencepiece(data, "the model")
    save_tokenizer(backend, tmp_path, "</s>", special_tokens=special_tokens(data), sentencepiece=data)
    transformers.LlamaConfig(vocab_size=300).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*PROBE_TEXTS, *tiny_corpus()]:
        assert theirs(text)["input_ids"] == processor.encode(text), repr(text)
    assert theirs.eos_token_id == processor.eos_id()
    assert (theirs.bos_token_id, theirs.unk_token_id) == (processor.bos_id(), processor.unk_id())
    assert len(theirs) == processor.get_piece_size()


@pytest.mark.parametrize("name", ["stories260K/tokenizer.model", "tokenizers/sp_unigram_1k.model"])
def test_real_models_on_real_text(shared_data: Path, name: str) -> None:
    data = read_sentencepiece(shared_data / name)
    backend, processor = convert_sentencepiece(data, name), SentencePieceProcessor(model_proto=data)
    backend.encode_special_tokens = True
    text = (shared_data / "wikitext-2" / "valid.txt").read_text() + (
        shared_data / "tinyshakespeare" / "input.txt"
    ).read_text()
    lines = text.split("\n")
    wrong = [line for line in lines if ids(backend, line) != processor.encode(line)]
    assert len(lines) > 40_000 and not wrong, wrong[:3]
    assert ids(backend, text[:30_000]) == processor.encode(text[:30_000])


@given(HARD)
def test_any_text_has_the_ids_of_a_real_model(shared_data: Path, text: str) -> None:
    for name in ("stories260K/tokenizer.model", "tokenizers/sp_unigram_1k.model"):
        if name not in REAL:
            data = read_sentencepiece(shared_data / name)
            REAL[name] = (convert_sentencepiece(data, name), SentencePieceProcessor(model_proto=data))
            REAL[name][0].encode_special_tokens = True
        backend, processor = REAL[name]
        assert ids(backend, text) == processor.encode(text)


REAL: dict[str, tuple[Backend, SentencePieceProcessor]] = {}


def test_what_is_read_of_a_model() -> None:
    read = SentencePieceModel.parse(model("unigram", **VARIANTS["llama"]))
    assert (read.algorithm, read.byte_fallback, read.adds_prefix, read.removes_extra_spaces) == (
        1,
        True,
        True,
        False,
    )
    assert read.words_are_separate and not read.normalization_map
    nfkc = SentencePieceModel.parse(model("bpe", **VARIANTS["t5"]))
    assert (nfkc.algorithm, nfkc.normalization, nfkc.removes_extra_spaces) == (2, "nmt_nfkc", True)
    processor = SentencePieceProcessor(model_proto=model("bpe", **VARIANTS["t5"]))
    assert [piece for piece, *_ in nfkc.pieces] == [processor.id_to_piece(i) for i in range(len(processor))]
    assert [score for _, score, _ in nfkc.pieces] == [processor.get_score(i) for i in range(len(processor))]
    joined = SentencePieceModel.parse(model("bpe", **VARIANTS["pieces of several words"]))
    assert not joined.words_are_separate


@pytest.mark.parametrize(
    ("algorithm", "options", "said"),
    [
        ("word", {"vocab_size": 30}, "splits into whole words or characters"),
        ("char", {"vocab_size": 40}, "splits into whole words or characters"),
        ("unigram", {"vocab_size": 160, "treat_whitespace_as_suffix": True}, "writes spaces behind words"),
    ],
)
def test_kinds_that_a_tokenizer_json_lacks_are_refused(
    algorithm: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=rf"x\.model {said}.*; use another tokenizer, or train one"):
        convert_sentencepiece(model(algorithm, **options), "x.model")


def test_a_conversion_that_would_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = model("bpe", **VARIANTS["llama"])
    # As if the prefix had been overlooked.
    wrong = replace(SentencePieceModel.parse(data), adds_prefix=False)
    monkeypatch.setattr(SentencePieceModel, "parse", lambda _: wrong)
    with pytest.raises(
        DataError, match=r"x\.model: .* other ids than sentencepiece for '.*; use another tokenizer"
    ):
        convert_sentencepiece(data, "x.model")


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 50, b"no model at all", bytes(range(256)), b"\x0a\x03\x0a\x01\xff"]
)
def test_what_is_no_model_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.model is not a sentencepiece model .*download it again"):
        read_sentencepiece(tmp_path / "x.model")


def test_half_a_model_is_named(tmp_path: Path) -> None:
    whole = model("bpe", **VARIANTS["t5"])
    for length in (1, 100, len(whole) - 3):
        (tmp_path / "x.model").write_bytes(whole[:length])
        with pytest.raises(DataError, match="is not a sentencepiece model"):
            read_sentencepiece(tmp_path / "x.model")
    with pytest.raises(DataError, match=r"nowhere\.model cannot be read"):
        read_sentencepiece(tmp_path / "nowhere.model")
