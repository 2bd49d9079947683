"""Training: exact sizes, the same result in every process, every text back from its ids."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Backend

from megalite.data.text.corpus import DocumentPiece
from megalite.data.tokenizers.sentencepiece_model import PROBE_TEXTS, convert_sentencepiece
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.data.tokenizers.tokenizer_training import (
    KINDS,
    evenly_spaced,
    fitting_vocab_size,
    train_bpe,
    train_into,
    train_sentencepiece,
)
from megalite.errors import DataError
from tests.support.tiny import tiny_corpus

ALGORITHMS = ("unigram", "bpe")


def pieces(texts: list[str]) -> list[DocumentPiece]:
    return [DocumentPiece(text, ends_document=True) for text in texts]


@pytest.fixture(scope="module", params=ALGORITHMS)
def model(request: pytest.FixtureRequest) -> bytes:
    return train_sentencepiece(pieces(tiny_corpus()), 290, request.param)


def test_a_sentencepiece_model_has_exactly_the_size_and_our_special_tokens(model: bytes) -> None:
    processor = SentencePieceProcessor(model_proto=model)
    assert len(processor) == 290
    assert [processor.id_to_piece(index) for index in range(3)] == ["<unk>", "<|endoftext|>", "<0x00>"]
    assert (processor.bos_id(), processor.eos_id(), processor.pad_id()) == (-1, 1, -1)
    words = [processor.id_to_piece(index) for index in range(258, 290)]
    assert [word for word in words if len(word) > 1]


def test_every_text_comes_back_from_a_sentencepiece_model(model: bytes) -> None:
    backend = convert_sentencepiece(model, "the model")
    for text in [*PROBE_TEXTS, *tiny_corpus(), "\0 null", "\r\n\n", "<0x0A> </s>"]:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert backend.decode(ids) == text
    assert backend.encode("a\nb").tokens[1] == "<0x0A>"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("vocab_size", [259, 260, 271, 290])
def test_any_size_that_the_text_has_words_for_is_reached(algorithm: str, vocab_size: int) -> None:
    model = train_sentencepiece(pieces(tiny_corpus()), vocab_size, algorithm)
    assert len(SentencePieceProcessor(model_proto=model)) == vocab_size


def test_a_rare_character_gets_no_piece() -> None:
    common = "the cat sat on the mat. " * 40
    trained = train_sentencepiece(pieces([common * 60 + "🙂"]), 270, "unigram")
    processor = SentencePieceProcessor(model_proto=trained)
    assert processor.piece_to_id("🙂") == processor.unk_id()
    assert len(processor.encode("🙂")) == 4  # bytes


@pytest.mark.parametrize("kind", list(KINDS))
def test_transformers_gives_the_ids_of_what_was_trained(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    train_into(tmp_path, pieces(tiny_corpus()), 290, kind=kind, end_of_document="<end>")
    ours = load_tokenizer(tmp_path, end_of_document="<end>")
    transformers.LlamaConfig(vocab_size=290).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*PROBE_TEXTS, *tiny_corpus(), "two<end> <end>documents"]:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_document_id
    assert len(theirs) == ours.vocab_size == 290
    beside = tmp_path / "tokenizer.model"
    assert beside.exists() == (kind != "bpe")
    if beside.exists():
        processor = SentencePieceProcessor(model_file=str(beside))
        assert [processor.encode(text) for text in PROBE_TEXTS] == [ours.encode(text) for text in PROBE_TEXTS]


def test_training_is_the_same_in_another_process(tmp_path: Path) -> None:
    script = """if True:
        import sys
        from tests.unit.data.tokenizers.test_tokenizer_training import (
            pieces, tiny_corpus, train_bpe, train_sentencepiece
        )
        sys.stdout.write(train_bpe(pieces(tiny_corpus()), 290).to_str())
        for algorithm in ("unigram", "bpe"):
            sys.stdout.write(train_sentencepiece(pieces(tiny_corpus()), 290, algorithm).hex())
    """
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True) for _ in range(2)]
    assert runs[0].returncode == 0, runs[0].stderr
    here = train_bpe(pieces(tiny_corpus()), 290).to_str()
    here += "".join(train_sentencepiece(pieces(tiny_corpus()), 290, each).hex() for each in ALGORITHMS)
    assert runs[0].stdout == runs[1].stdout == here


def trainers() -> list[Callable[..., Backend | bytes]]:
    return [train_bpe, *(lambda *given, each=each: train_sentencepiece(*given, each) for each in ALGORITHMS)]


@pytest.mark.parametrize("train", trainers(), ids=list(KINDS))
def test_a_vocabulary_that_cannot_be_reached_is_refused(train: Callable[..., Backend | bytes]) -> None:
    with pytest.raises(DataError, match=r"of \d+ only, not 5000; set tokenizer\.vocab_size"):
        train(pieces(["abc abc"]), 5000)
    with pytest.raises(DataError, match=r"200 has no room for 256 bytes.*at least 25[79]"):
        train(pieces(["abc"]), 200)
    with pytest.raises(DataError, match="there is no text"):
        train([], 300)


def test_a_text_that_sentencepiece_cannot_take_is_refused() -> None:
    with pytest.raises(DataError, match=r"cannot train on this text.*tokenizer\.kind = 'bpe'"):
        train_sentencepiece(pieces(["▅ \0 ▅"]), 300, "unigram")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 300))
def test_the_sample_is_every_nth_piece_and_fits(lengths: list[int], limit: int) -> None:
    texts = [chr(65 + index) * length for index, length in enumerate(lengths)]
    kept = evenly_spaced(pieces(texts), limit)
    stride = next(2**power for power in range(8) if texts[:: 2**power] == kept)
    assert sum(map(len, kept)) <= limit or len(kept) == 1
    if stride > 1:  # no denser one would have fitted
        assert sum(map(len, texts[:: stride // 2])) > limit


def test_the_fitting_vocabulary_grows_with_the_text() -> None:
    sizes = [1, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9, 10**12]
    assert [fitting_vocab_size(size) for size in sizes] == [512, 512, 512, 1024, 4096, 8192, 32768, 32768]
