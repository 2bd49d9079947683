"""Which documents train, validate and test, and which are left out for being short."""

import json
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.files.token_file import TokenFile
from megalite.data.prepare.prepare import Preparation, prepare_outputs
from megalite.data.prepare.split import Split
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError


def write(path: Path, texts: list[str]) -> Corpus:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Corpus.open([str(path)])


def documents(prefix: Path, tokenizer: Tokenizer) -> list[str]:
    file = TokenFile.open(prefix)
    return [tokenizer.decode(file.document(index)[:-1].tolist()) for index in range(file.num_documents)]


def split_files(folder: Path, count: int) -> tuple[Path, ...]:
    return tuple(folder / name for name in ("train", "validation", "test")[:count])


TEXTS = [f"document {index}" for index in range(300)]


@pytest.mark.parametrize("shares", [(0.8, 0.2), (0.6, 0.3, 0.1)])
def test_every_document_is_in_one_part_in_its_order(
    tmp_path: Path, tokenizer: Tokenizer, shares: tuple[float, ...]
) -> None:
    outputs = split_files(tmp_path / "out", len(shares))
    preparation = Preparation(write(tmp_path / "a.jsonl", TEXTS), tokenizer, outputs, split=Split(shares, 7))
    facts = prepare_outputs(preparation, workers=1)
    parts = [documents(prefix, tokenizer) for prefix in outputs]
    assert sorted(chain.from_iterable(parts)) == sorted(TEXTS)
    assert all(sorted(part, key=TEXTS.index) == part for part in parts)
    for part, share, fact in zip(parts, shares, facts, strict=True):
        assert len(part) == fact.documents
        assert abs(len(part) - 300 * share) < 4 * (300 * share * (1 - share)) ** 0.5
    assert prepare_outputs(preparation) == facts


def test_a_share_of_nothing_makes_no_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    split = Split((0.9, 0.0, 0.1))
    outputs = (tmp_path / "train", tmp_path / "test")
    prepare_outputs(Preparation(write(tmp_path / "a.jsonl", TEXTS), tokenizer, outputs, split=split))
    assert {split.part(index) for index in range(300)} == {0, 2}
    assert documents(outputs[1], tokenizer) == [
        text for index, text in enumerate(TEXTS) if split.part(index) == 2
    ]


@given(st.integers(0, 2**63), st.floats(0.05, 0.95))
def test_the_parts_follow_from_the_seed_alone(seed: int, share: float) -> None:
    split = Split((share, 1 - share), seed)
    drawn = [split.part(document) for document in range(400)]
    assert drawn == [split.part(document) for document in range(400)]
    assert abs(Counter(drawn)[0] - 400 * share) < 6 * (400 * share * (1 - share)) ** 0.5
    assert drawn != [Split((share, 1 - share), seed + 1).part(document) for document in range(400)]


def test_shares_that_do_not_quite_sum_to_one_leave_no_document_out() -> None:
    shares = (0.7, 0.2, 0.1 - 1e-9)
    assert {Split(shares).part(document) for document in range(2000)} == {0, 1, 2}


def by_tokens(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, split: Split, length: int
) -> list[TokenFile]:
    outputs = split_files(folder, len(split.parts))
    preparation = Preparation(corpus, tokenizer, outputs, split=split, sequence_length=length)
    facts = prepare_outputs(preparation)
    assert all(each.split_by_tokens for each in facts)
    assert preparation.done() == facts
    return [TokenFile.open(each) for each in outputs]


@pytest.mark.parametrize("texts", [TEXTS[:1], [" ".join(TEXTS)], TEXTS[:2]])
@pytest.mark.parametrize("shares", [(0.9, 0.1), (0.5, 0.25, 0.25)])
def test_too_few_documents_are_split_by_tokens(
    tmp_path: Path, tokenizer: Tokenizer, texts: list[str], shares: tuple[float, ...]
) -> None:
    """Contiguous parts in order, without overlap; those held out have whole sequences and a last label."""
    texts = [text * 4 for text in texts]
    corpus, split, length = write(tmp_path / "a.jsonl", texts), Split(shares, 3), 7
    files = by_tokens(tmp_path / "out", corpus, tokenizer, split, length)
    end = tokenizer.end_of_document_id
    ids = [token for text in texts for token in tokenizer.encode(text)]
    assert [token for file in files for token in file.tokens.tolist() if token != end] == ids
    for file, share in zip(files[1:], shares[1:], strict=True):
        assert (file.num_tokens - 1) % length in (0, length - 1)  # one less if a document ends at the cut
        assert abs(file.num_tokens - share * len(ids)) <= length + 1
    for file in files:
        file.check_index()
        assert all(file.document(index)[-1] == end for index in range(file.num_documents))
    again = by_tokens(tmp_path / "again", corpus, tokenizer, split, length)
    assert [file.tokens.tolist() for file in again] == [file.tokens.tolist() for file in files]
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin", ".idx", ".json"}
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def needed(split: Split) -> int:
    """The least number of documents with which each of two parts gets one."""
    first = split.part(0)
    return next(number + 1 for number in range(1000) if split.part(number) != first)


def test_enough_documents_are_not_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    split = Split((0.9, 0.1))
    enough = needed(split)
    for count, cut in ((enough, False), (enough - 1, True)):
        corpus = write(tmp_path / f"{count}.jsonl", [TEXTS[0]] * count)
        outputs = split_files(tmp_path / f"out{count}", 2)
        facts = prepare_outputs(Preparation(corpus, tokenizer, outputs, split=split))
        assert [each.split_by_tokens for each in facts] == [cut, cut]


def test_a_text_without_a_sequence_for_each_part_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = write(tmp_path / "a.jsonl", ["only one"])
    tokens = len(tokenizer.encode("only one")) + 1
    outputs = split_files(tmp_path / "out", 2)
    preparation = Preparation(corpus, tokenizer, outputs, split=Split((0.9, 0.1)), sequence_length=64)
    said = rf"a\.jsonl has {tokens} tokens, too few for a sequence of 64 .* to {(tokens - 1) // 2} or less"
    with pytest.raises(DataError, match=rf"^data\.split: .*{said}"):
        prepare_outputs(preparation)
    assert prepare_outputs(replace(preparation, sequence_length=(tokens - 1) // 2))


def test_a_part_with_short_documents_only_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    split = Split((0.5, 0.5))
    texts = [TEXTS[0]] * (needed(split) - 1) + ["a"]  # the last one alone is in the other part
    preparation = Preparation(
        write(tmp_path / "a.jsonl", texts),
        tokenizer,
        split_files(tmp_path / "out", 2),
        min_length=5,
        split=split,
    )
    with pytest.raises(
        DataError, match=r"^data\.split: the \w+ part gets none of .*; lower data\.min_length"
    ):
        prepare_outputs(preparation)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("min_length", [0, 1, 4, 9])
def test_short_documents_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, min_length: int
) -> None:
    texts = [
        "a",
        "one rank waits",
        "a pipeline sends the weights to its peers, and one rank waits",
        "xyz 1234",
        "é",
    ]
    lengths = {text: len(tokenizer.encode(text)) for text in texts}
    preparation = Preparation(write(tmp_path / "a.jsonl", texts), tokenizer, (tmp_path / "x",), min_length)
    [facts] = prepare_outputs(preparation)
    kept = [text for text in texts if lengths[text] >= min_length]
    assert documents(tmp_path / "x", tokenizer) == kept
    assert (facts.documents, facts.short_documents, facts.min_length) == (
        len(kept),
        len(texts) - len(kept),
        min_length,
    )
    assert replace(preparation, min_length=min_length + 1).done() is None


def test_nothing_but_short_documents_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    preparation = Preparation(
        write(tmp_path / "a.jsonl", ["a", "b"]), tokenizer, (tmp_path / "x",), min_length=50
    )
    with pytest.raises(
        DataError, match=r"all 2 documents of .*a\.jsonl have fewer than 50 tokens; lower data\.min_length"
    ):
        prepare_outputs(preparation)


def test_left_out_documents_do_not_move_the_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = write(tmp_path / "a.jsonl", [text if index % 3 else "x" for index, text in enumerate(TEXTS)])
    parts = []
    for min_length in (0, 2):
        outputs = split_files(tmp_path / str(min_length), 2)
        prepare_outputs(Preparation(corpus, tokenizer, outputs, min_length, Split((0.7, 0.3))))
        parts.append([[text for text in documents(prefix, tokenizer) if text != "x"] for prefix in outputs])
    assert parts[0] == parts[1]
