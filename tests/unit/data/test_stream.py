"""Streamed text: every document in one lane, any place found again, the same rows in every split of the batch."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megalite.data.batches.loader import BatchShare
from megalite.data.batches.stream_files import StreamFile, first_rows, lane_segments, stream_files
from megalite.data.batches.stream_lane import DocumentEncoder, Lane, StreamText, require_documents
from megalite.data.batches.stream_loader import StreamLoader
from megalite.data.text.corpus import PIECE_CHARACTERS, Corpus
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.tiny import tiny_corpus

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = tiny_corpus(90)
LENGTH = 16


def jsonl(path: Path, texts: Sequence[str]) -> Path:
    # Blank lines and both ends of line, which all count as bytes.
    path.write_bytes(
        b"".join(
            json.dumps({"text": each}).encode() + b"\r\n\n"[index % 2 :] for index, each in enumerate(texts)
        )
    )
    return path


def table(path: Path, texts: Sequence[str | None]) -> Path:
    parquet.write_table(
        pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}), path, row_group_size=7
    )
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[StreamFile, ...]:
    """Three files with TEXTS, and one that is empty."""
    (tmp_path / "b.jsonl").touch()
    paths = (
        jsonl(tmp_path / "a.jsonl", TEXTS[:40]),
        tmp_path / "b.jsonl",
        table(tmp_path / "c.parquet", TEXTS[40:75]),
    )
    last = jsonl(tmp_path / "d.jsonl", TEXTS[75:])
    return stream_files(Corpus.open([*map(str, paths), str(last)]))


def texts_of(files: Sequence[StreamFile], lane: int, lanes: int) -> list[str]:
    return [
        text
        for each in lane_segments(files, lane, lanes)
        for text, _ in files[each.file].documents(each.start, each.stop, "text")
    ]


@pytest.mark.parametrize("lanes", [1, 2, 3, 8, 50])
def test_every_document_is_in_one_lane(files: tuple[StreamFile, ...], lanes: int) -> None:
    found = [texts_of(files, lane, lanes) for lane in range(lanes)]
    assert [text for each in found for text in each] == TEXTS
    sizes = [sum(len(text.encode()) for text in each) for each in found]
    assert max(sizes) - min(sizes) < 0.9 * sum(sizes) / lanes + 400


@settings(max_examples=30)
@given(cut=st.lists(st.integers(0, 4000), min_size=1, max_size=6))
def test_any_byte_is_the_end_of_one_part_and_the_start_of_the_next(
    tmp_path_factory: pytest.TempPathFactory, cut: list[int]
) -> None:
    path = jsonl(tmp_path_factory.mktemp("cut") / "a.jsonl", TEXTS[:40])
    file = StreamFile(path, path.stat().st_size)
    places = [0, *(file.first_place(min(each, file.size_bytes)) for each in sorted(cut)), file.size_bytes]
    found = [text for start, stop in pairwise(places) for text, _ in file.documents(start, stop, "text")]
    assert found == TEXTS[:40]


def test_documents_go_on_from_any_place(files: tuple[StreamFile, ...]) -> None:
    for file in files:
        stop = file.first_place(file.size_bytes)
        known = list(file.documents(0, stop, "text"))
        for number, (_, behind) in enumerate(known, start=1):
            assert list(file.documents(behind, stop, "text")) == known[number:]


def lane(
    files: tuple[StreamFile, ...], tokenizer: Tokenizer, *, seed: int | None = None, **changes: int
) -> Lane:
    text = StreamText(files, min_length=changes.pop("min_length", 0), seed=seed)
    return Lane(text, 1, 3, encode=DocumentEncoder(tokenizer), sequence_length=LENGTH, **changes)


def tokens_of(texts: Sequence[str], tokenizer: Tokenizer) -> NDArray[np.int64]:
    return np.concatenate([[*tokenizer.encode(text), tokenizer.end_of_document_id] for text in texts])


def test_sequences_are_the_tokens_of_the_documents_in_order(
    files: tuple[StreamFile, ...], tokenizer: Tokenizer
) -> None:
    once = tokens_of(texts_of(files, 1, 3), tokenizer)
    tokens = np.concatenate([once] * 3)
    read = lane(files, tokenizer)
    for number in range(2 * len(once) // LENGTH):
        expected = tokens[number * LENGTH : (number + 1) * LENGTH + 1]
        assert np.array_equal(read.sequence(number), expected)


@exhibit(
    "datasets#8308",
    also=("torchtitan#3907", "torchtitan PR#3008"),
    subject="checkpoints",
    there="streamed data began again at the second resume, or went on at a wrong place after the first epoch",
    here="streamed text goes on at any sequence, through the end of an epoch too",
    fault=faults.A_RESUMED_STREAM_BEGINS_AGAIN,
)
@pytest.mark.parametrize("seed", [None, 5])
def test_a_lane_goes_on_at_any_sequence(
    files: tuple[StreamFile, ...], tokenizer: Tokenizer, seed: int | None
) -> None:
    """Through the end of its part, with its documents shuffled or not, and with blocks of several documents."""
    whole = lane(files, tokenizer, seed=seed, remembered=1000)
    known = [whole.sequence(number) for number in range(120)]
    for number in (0, 1, 17, 50, 51, 119):
        other = lane(files, tokenizer, seed=seed)
        other.go_on(number, whole.place(number))
        for later in range(number, 120):
            assert np.array_equal(other.sequence(later), known[later])
    # Back to a remembered one, and to one that is not.
    for number in (60, 3):
        assert np.array_equal(whole.sequence(number), known[number])
    forgetful = lane(files, tokenizer, seed=seed)
    for number in (10, 11, 2, 30):
        assert np.array_equal(forgetful.sequence(number), known[number])


def test_blocks_are_shuffled_anew_in_each_epoch(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.data.batches.stream_lane._BLOCK_DOCUMENTS", 10)
    path = jsonl(tmp_path / "a.jsonl", TEXTS[:30])
    text = StreamText((StreamFile(path, path.stat().st_size),), seed=1)
    read = Lane(text, 0, 1, encode=lambda each: np.array([TEXTS.index(each), 0]), sequence_length=60)
    orders = [read.sequence(epoch)[:-1:2].tolist() for epoch in range(2)]
    for order in orders:
        assert [sorted(order[at : at + 10]) for at in (0, 10, 20)] == [
            [*range(at, at + 10)] for at in (0, 10, 20)
        ]
        assert order != sorted(order)
    assert orders[0] != orders[1]


def test_short_documents_are_left_out(files: tuple[StreamFile, ...], tokenizer: Tokenizer) -> None:
    lengths = sorted(len(tokenizer.encode(text)) for text in texts_of(files, 1, 3))
    least = lengths[len(lengths) // 2]
    kept = [text for text in texts_of(files, 1, 3) if len(tokenizer.encode(text)) >= least]
    read = lane(files, tokenizer, min_length=least)
    assert np.array_equal(read.sequence(0), tokens_of(kept, tokenizer)[: LENGTH + 1])
    with pytest.raises(DataError, match=f"fewer than {10 * lengths[-1]} tokens; lower data.min_length"):
        lane(files, tokenizer, min_length=10 * lengths[-1]).sequence(0)


def loader(files: tuple[StreamFile, ...], tokenizer: Tokenizer, **changes: int) -> StreamLoader:
    mask = bool(changes.pop("document_mask", False))
    sizes = {"micro_batch_size": 6, "micro_batches": 1, "sequence_length": LENGTH, **changes}
    text = StreamText(files, seed=3)
    return StreamLoader(text, tokenizer, BatchShare(**sizes), document_mask=mask, remembered=4)


def test_every_split_of_the_batch_has_the_same_rows(
    files: tuple[StreamFile, ...], tokenizer: Tokenizer
) -> None:
    whole = loader(files, tokenizer, document_mask=True)
    parts = [
        loader(
            files, tokenizer, document_mask=True, dp_rank=rank, dp_size=3, micro_batch_size=1, micro_batches=2
        )
        for rank in range(3)
    ]
    for step in range(4):
        batch = whole.step_batch(6 * step)
        rows = {}
        for each in parts:
            part = each.step_batch(6 * step)
            fields = zip(part.input_ids, part.labels, part.position_ids, part.document_ids, strict=True)
            rows.update(zip(part.sample_indices.tolist(), fields, strict=True))
        for index, *expected in zip(
            batch.sample_indices.tolist(),
            batch.input_ids,
            batch.labels,
            batch.position_ids,
            batch.document_ids,
            strict=True,
        ):
            assert all(map(lambda a, b: a.equal(b), rows[index], expected))
        assert (batch.labels[:, :-1] == batch.input_ids[:, 1:]).all()
    places = {row: place for each in parts for row, place in each.places(12).items()}
    assert places == whole.places(12)
    again = loader(files, tokenizer, document_mask=True)
    again.go_on(12, [places[row] for row in range(6)])
    assert again.step_batch(12).input_ids.equal(whole.step_batch(12).input_ids)


def test_long_documents_have_the_tokens_of_the_whole(tokenizer: Tokenizer) -> None:
    long = "".join(TEXTS) * 60
    assert len(long) > PIECE_CHARACTERS
    assert np.array_equal(DocumentEncoder(tokenizer)(long), tokens_of([long], tokenizer))


def test_a_lane_without_a_document_is_named(files: tuple[StreamFile, ...]) -> None:
    require_documents(files, 50, "text")
    with pytest.raises(
        DataError, match=r"no document begins in part \d+ of 400 .* training.global_batch_size = 400"
    ):
        require_documents(files, 400, "text")


def _works(files: Sequence[StreamFile], lanes: int) -> bool:
    return all(
        any(
            text
            for each in lane_segments(files, lane, lanes)
            for text, _ in files[each.file].documents(each.start, each.stop, "text")
        )
        for lane in range(lanes)
    )


@pytest.mark.parametrize("multiple", [1, 3, 8])
@pytest.mark.parametrize("lengths", [[40] * 30, [2000, *[40] * 30], [40] * 10 + [900] + [0] * 9, [7]])
def test_the_largest_global_batch_that_works_is_said(
    tmp_path: Path, lengths: list[int], multiple: int
) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["x" * length for length in lengths])
    files = (StreamFile(path, path.stat().st_size),)
    lanes = 48
    best = max((n for n in range(multiple, lanes, multiple) if _works(files, n)), default=0)
    with pytest.raises(DataError) as refused:
        require_documents(files, lanes, "text", multiple=multiple)
    said = str(refused.value)
    if best:
        require_documents(files, best, "text", multiple=multiple)
        assert f"use training.global_batch_size = {best}, the largest that works" in said
        assert (f"among the multiples of {multiple} (" in said) == (multiple > 1)
    else:
        assert "part of its own; name more text, or set data.streaming = false" in said


def test_a_lane_with_short_documents_alone_is_named_before_the_start(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["x" * 90] * 9 + ["y"] * 30)
    files = (StreamFile(path, path.stat().st_size),)
    require_documents(files, 4, "text")
    with pytest.raises(DataError, match=r"no document of data.min_length = 9 tokens begins in part 4 of 4"):
        require_documents(files, 4, "text", min_length=9)


def test_a_bad_line_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    lines = path.read_bytes().splitlines(keepends=True)
    place = sum(map(len, lines[:21]))
    for line, said in (
        (b'{"text": 5}', "column 'text' holds int, not text"),
        (b'{"text": "a', "not JSON"),
        (b'{"other": "a"}', "no column 'text'"),
    ):
        size = len(lines[21])
        bad = line.ljust(size - 1) + b"\n"
        path.write_bytes(b"".join([*lines[:21], bad, *lines[22:]]))
        file = StreamFile(path, path.stat().st_size)
        with pytest.raises(DataError) as caught:
            list(file.documents(file.first_place(place), file.size_bytes, "text"))
        assert f"{path}, line 22: {said}" in str(caught.value)
        assert "keeps its" in str(caught.value) and "overwrite the line with spaces" in str(caught.value)
        path.write_bytes(b"".join([*lines[:21], b" " * (size - 1) + b"\n", *lines[22:]]))
        assert len(list(file.documents(0, file.size_bytes, "text"))) >= 19


def test_rows_without_a_value_are_skipped(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [None, "one", None, "two", *[None] * 9, "three"])
    file = StreamFile(path, path.stat().st_size)
    assert list(file.documents(0, 14, "text")) == [("one", 2), ("two", 4), ("three", 14)]


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.txt", "is neither .jsonl nor .parquet"), ("a.jsonl.gz", "is compressed"), ("a.arrow", "is neither")],
)
def test_files_that_cannot_be_read_in_parts_are_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(DataError, match=f"--source: .*{name} {said}.*data.streaming = false"):
        stream_files(Corpus.open([str(tmp_path / name)]))


def test_columns_of_the_first_rows_without_effect_are_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "foo": 1}, {"text": "b"}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    parquet.write_table(pyarrow.table({"text": ["c"], "bar": [1]}), tmp_path / "b.parquet")
    files = stream_files(Corpus.open([str(tmp_path)]))
    assert list(first_rows(files, "text").sentences(["x"], "first row")) == [
        "data: keys without effect in x: 'foo' in 1, 'bar' in 1 of 3 first rows"
    ]


def test_rows_that_say_not_to_train_on_them_are_left_out_of_a_stream(tmp_path: Path) -> None:
    rows = [
        {"text": "a"},
        {"text": "b", "train": False},
        {"text": "c", "masked": True},
        {"text": "d", "weight": 0},
    ]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = stream_files(Corpus.open([str(tmp_path)]))
    documents = [text for text, _ in files[0].documents(0, files[0].size_bytes, "text")]
    assert documents == ["a", "c"]
    said, columns = first_rows(files, "text").sentences(["x"], "first row")
    assert said.startswith("data: 2 of 4 first rows of x say not to train on them")
    assert columns == "data: keys without effect in x: 'masked' in 1 of 2 first rows"
