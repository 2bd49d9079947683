"""The table of words gives what the tokenizer gives, whatever stands in a text."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from megalite.data.tokenizers.word_cache import WordCache, word_cache
from tests.support.tiny import tiny_corpus

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
UINT16 = np.dtype(np.uint16)
TEXT = (
    "".join(tiny_corpus())
    + "It's 12345 men'S café “naïve” 日本語の文\n\n"
    + "  def f(x):\n\treturn  x;\r\n\u00a0e\u0301 ½ \u0661\u0662 😀\x1c.\x85\u2028 "
)
LETTERS = " \n\t\r\v\x00\x1c\x1f\x85'aSTd19.,(-_é\u0301“\u00a0\u2028½\u0661日😀\ufeff"


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


def trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.encode_special_tokens = True
    return backend


BACKENDS = {
    "GPT-2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Llama 3": trained(split(LLAMA3)),
    "Qwen": trained(split(QWEN), normalizers.NFC()),
}


def table(backend: Backend) -> WordCache:
    found = word_cache(backend, UINT16)
    assert found is not None
    return found


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=300)
@given(text=st.text(st.sampled_from(LETTERS), max_size=30) | st.text(max_size=30))
def test_of_any_text(name: str, text: str) -> None:
    backend = BACKENDS[name]
    for each in (text, f"a </s> word {text} two\n{text}\nlines"):
        assert table(backend).ids(each).tolist() == backend.encode(each, add_special_tokens=False).ids


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("most", [3, 1 << 17])
def test_of_a_long_text_and_a_full_table(name: str, most: int) -> None:
    backend = BACKENDS[name]
    with mock.patch("megalite.data.tokenizers.word_cache._MOST_WORDS", most):
        found = table(backend)
        for text in (TEXT, TEXT):
            assert found.ids(text).tolist() == backend.encode(text, add_special_tokens=False).ids
        assert 0 < len(found) <= most


def test_of_a_text_with_added_tokens() -> None:
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.add_tokens(["the call", AddedToken("tensor", single_word=True, lstrip=True)])
    text = "see the call of the  tensor and tensors, the\ncall"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert table(backend).ids(text).tolist() == ids and max(ids) == backend.get_vocab_size() - 1


@pytest.mark.parametrize(
    "backend",
    [
        trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        trained(split(r"\w+|\W")),
        trained(split(GPT2), normalizers.Lowercase()),
        trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])),
        Backend(models.Unigram([("a", -1.0)], 0)),
    ],
    ids=["prefix", "pattern", "normalizer", "sequence", "unigram"],
)
def test_others_have_none(backend: Backend) -> None:
    assert word_cache(backend, UINT16) is None
