"""Lengths and repeated documents of a token file."""

from pathlib import Path

import numpy as np

from megalite.data.files.token_file import TokenFile, TokenWriter
from megalite.data.prepare.length_summary import length_counts, repeated_documents


def written(prefix: Path, documents: list[list[int]], longest_sequence: int = 4) -> TokenFile:
    with (
        prefix.with_suffix(".bin").open("wb") as bin_file,
        prefix.with_suffix(".idx").open("wb") as idx_file,
    ):
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16), longest_sequence)
        for document in documents:
            writer.add(np.array(document, dtype=np.uint16))
            writer.end_document()
        writer.finish()
        writer.close()
    return TokenFile.open(prefix)


def test_documents_are_counted_by_powers_of_two() -> None:
    lengths = np.array([3, 1, 0, 4, 7, 8, 2, 40])
    assert length_counts(lengths) == [
        (0, 1, 2),
        (2, 3, 2),
        (4, 7, 2),
        (8, 15, 1),
        (16, 31, 0),
        (32, 63, 1),
    ]
    assert length_counts(np.array([64, 127])) == [(64, 127, 2)]
    assert length_counts(np.array([], dtype=np.int64)) == []


def test_a_document_of_several_sequences_has_the_length_of_all(tmp_path: Path) -> None:
    documents = [[1] * 9, [2], [3] * 4, [4] * 5]
    file = written(tmp_path / "x", documents)
    assert file.num_sequences == 7
    assert file.document_lengths.tolist() == [9, 1, 4, 5]


def test_repeated_documents_are_those_with_equal_tokens(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5], [1, 2], [1, 2, 3, 4, 5], [2, 1], [1, 2, 3, 4, 5], [1, 2]]
    repeats = repeated_documents(written(tmp_path / "x", documents))
    assert repeats == {0: 2, 1: 1}
