"""The .bin/.idx layout, byte by byte, and what is said about damaged pairs."""

import struct
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.files import token_file
from megalite.data.files.token_file import TokenFile, TokenWriter, bin_path, idx_path, token_dtype
from megalite.errors import DataError


def write(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16, longest: int = 2**31 - 1) -> Path:
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(dtype), longest)
        for document in documents:
            writer.add(np.array(document, dtype=dtype))
            writer.end_document()
        writer.finish()
        writer.close()
    return prefix


def megatron_idx(lengths: list[int], document_indices: list[int], code: int, item_bytes: int) -> bytes:
    """As `_IndexWriter` of megatron-core's indexed_dataset.py writes it, spelled out."""
    offsets, at = [], 0
    for length in lengths:
        offsets.append(at)
        at += length * item_bytes
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(document_indices))
        + np.array(lengths, dtype=np.int32).tobytes()
        + np.array(offsets, dtype=np.int64).tobytes()
        + np.array(document_indices, dtype=np.int64).tobytes()
    )


def test_the_bytes_are_those_of_megatron(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1, 2, 3], [4], [60000, 6]])
    assert bin_path(prefix).read_bytes() == np.array([1, 2, 3, 4, 60000, 6], dtype="<u2").tobytes()
    assert idx_path(prefix).read_bytes() == megatron_idx([3, 1, 2], [0, 1, 2, 3], 8, 2)


def test_wide_ids_are_int32(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[70000, 2]], np.int32)
    assert idx_path(prefix).read_bytes() == megatron_idx([2], [0, 1], 4, 4)
    assert TokenFile.open(prefix).tokens.tolist() == [70000, 2]


def test_the_dtype_follows_megatrons_threshold() -> None:
    assert (token_dtype(65499), token_dtype(65500)) == (np.dtype(np.uint16), np.dtype(np.int32))


@given(st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=9), st.integers(1, 12))
def test_documents_come_back_however_their_sequences_are_cut(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], longest: int
) -> None:
    prefix = write(tmp_path_factory.mktemp("round_trip") / "x", documents, longest=longest)
    file = TokenFile.open(prefix)
    file.check_index()
    assert [file.document(index).tolist() for index in range(file.num_documents)] == documents
    assert file.tokens.tolist() == [token for document in documents for token in document]
    assert all(length <= longest for length in file.sequence_lengths)


def test_a_long_index_is_written_and_checked_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [[1], [2, 3], [], [4, 5, 6, 7, 8], [9]]
    whole = idx_path(write(tmp_path / "whole", documents, longest=3)).read_bytes()
    monkeypatch.setattr(token_file, "_ROWS", 2)
    prefix = write(tmp_path / "blocks", documents, longest=3)
    assert idx_path(prefix).read_bytes() == whole
    TokenFile.open(prefix).check_index()


def test_a_document_longer_than_a_sequence_can_be_is_several(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1], [1, 2, 3, 4, 5], [6]], longest=2)
    assert idx_path(prefix).read_bytes() == megatron_idx([1, 2, 2, 1, 1], [0, 1, 4, 5], 8, 2)
    assert TokenFile.open(prefix).document(1).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]
)
def test_every_integer_type_of_megatron_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    tokens = np.array([7, 1, 2, 0], dtype=dtype)
    (tmp_path / "x.bin").write_bytes(tokens.tobytes())
    (tmp_path / "x.idx").write_bytes(megatron_idx([2, 2], [0, 1, 2], code, tokens.itemsize))
    assert TokenFile.open(tmp_path / "x").tokens.tolist() == [7, 1, 2, 0]


def read_as_specified(prefix: Path) -> list[list[list[int]]]:
    """The sequences of each document, by a reader that knows the description of the format and none of our code."""
    idx, data = (
        prefix.with_name(prefix.name + ".idx").read_bytes(),
        prefix.with_name(prefix.name + ".bin").read_bytes(),
    )
    assert idx[:9] == b"MMIDIDX\0\0"
    version, code, sequences, rows = struct.unpack_from("<QBQQ", idx, 9)
    assert version == 1
    kind, size = {8: ("H", 2), 4: ("i", 4)}[code]
    lengths = struct.unpack_from(f"<{sequences}i", idx, 34)
    offsets = struct.unpack_from(f"<{sequences}q", idx, 34 + 4 * sequences)
    firsts = struct.unpack_from(f"<{rows}q", idx, 34 + 12 * sequences)
    assert len(idx) == 34 + 12 * sequences + 8 * rows and len(data) == sum(lengths) * size
    read = [list(struct.unpack_from(f"<{n}{kind}", data, at)) for n, at in zip(lengths, offsets, strict=True)]
    assert firsts[0] == 0 and firsts[-1] == sequences
    return [read[first:end] for first, end in pairwise(firsts)]


@given(
    st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), min_size=1, max_size=9), st.booleans()
)
def test_a_reader_of_the_description_reads_ours(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], wide: bool
) -> None:
    prefix = tmp_path_factory.mktemp("ours") / "x"
    write(prefix, documents, np.int32 if wide else np.uint16)
    assert read_as_specified(prefix) == [[document] for document in documents]
    write(prefix, documents, longest=4)
    assert [list(chain.from_iterable(each)) for each in read_as_specified(prefix)] == documents


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
@pytest.mark.parametrize("modes", [b"", bytes(5)], ids=["text", "modes"])
def test_megatrons_documents_of_several_sequences_are_read(
    tmp_path: Path, code: int, dtype: str, modes: bytes
) -> None:
    """Two sentences, none, three: as preprocess_data.py --split-sentences and an empty document give them."""
    tokens = np.arange(1, 16, dtype=dtype)
    (tmp_path / "x.bin").write_bytes(tokens.tobytes())
    idx = megatron_idx([4, 3, 1, 5, 2], [0, 2, 2, 5], code, tokens.itemsize)
    (tmp_path / "x.idx").write_bytes(idx + modes)
    file = TokenFile.open(tmp_path / "x")
    file.check_index()
    assert [file.document(index).tolist() for index in range(3)] == [
        list(range(1, 8)),
        [],
        list(range(8, 16)),
    ]


def test_sequences_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(8))
    (tmp_path / "x.idx").write_bytes(GOOD + b"\0\1")
    with pytest.raises(
        DataError, match=r"x\.idx has sequences of another mode than 0, text; prepare the text alone"
    ):
        TokenFile.open(tmp_path / "x")


@pytest.fixture
def indexed_dataset() -> Any:
    name = "megatron.core.datasets.indexed_dataset"
    return pytest.importorskip(name, reason="megatron-core is not installed")


@pytest.mark.filterwarnings("ignore")
def test_megatron_core_reads_ours(tmp_path: Path, indexed_dataset: Any) -> None:
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    dataset = indexed_dataset.IndexedDataset(str(write(tmp_path / "x", documents, longest=3)))
    assert [dataset[index].tolist() for index in range(len(dataset))] == [[1, 2, 3], [4], [5, 6, 7], [8, 9]]
    assert dataset.document_indices.tolist() == [0, 1, 2, 4]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_cores_files_are_read(
    tmp_path: Path, indexed_dataset: Any, dtype: Any, multimodal: bool
) -> None:
    torch = pytest.importorskip("torch")
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype, multimodal)
    for document in ([[1, 2], [3]], [[4, 5, 6]]):
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    file = TokenFile.open(tmp_path / "x")
    file.check_index()
    assert (file.dtype, file.num_sequences) == (np.dtype(dtype), 3)
    assert [file.document(index).tolist() for index in range(2)] == [[1, 2, 3], [4, 5, 6]]


def damage(idx: bytes, at: int, new: bytes) -> bytes:
    return idx[:at] + new + idx[at + len(new) :]


GOOD = megatron_idx([2, 2], [0, 1, 2], 8, 2)


@pytest.mark.parametrize(
    ("idx", "data", "complaint"),
    [
        (GOOD, bytes(7), r"x\.bin has 7 bytes where .*x\.idx says 8; .*prepare or copy both files again"),
        (GOOD, bytes(10), r"x\.bin has 10 bytes where"),
        (GOOD[:-1], bytes(8), r"x\.idx has \d+ bytes where its header says"),
        (GOOD + b"\0", bytes(8), r"x\.idx has \d+ bytes where its header says"),
        (GOOD[:20], bytes(8), "is not a Megatron index"),
        (damage(GOOD, 0, b"TNTIDX"), bytes(8), "is not a Megatron index"),
        (b"", bytes(8), "is not a Megatron index"),
        (damage(GOOD, 9, struct.pack("<Q", 2)), bytes(8), "version 2; only version 1"),
        (damage(GOOD, 17, b"\x07"), bytes(8), "dtype code 7, which holds no token ids"),
        (damage(GOOD, 18, struct.pack("<Q", 2**60)), bytes(8), "bytes where its header says"),
    ],
)
def test_damaged_pairs_are_refused(tmp_path: Path, idx: bytes, data: bytes, complaint: str) -> None:
    (tmp_path / "x.idx").write_bytes(idx)
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(DataError, match=complaint):
        TokenFile.open(tmp_path / "x")


@pytest.mark.parametrize("missing", ["x.bin", "x.idx"])
def test_a_missing_half_is_named(tmp_path: Path, missing: str) -> None:
    write(tmp_path / "x", [[1]])
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=rf"{missing} does not exist; prepare the corpus first"):
        TokenFile.open(tmp_path / "x")


def test_an_index_out_of_order_is_found_when_it_is_checked(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(8))
    lengths_at, offsets_at, documents_at = 34, 34 + 8, 34 + 24
    for at, new in ((lengths_at, struct.pack("<i", 1)), (offsets_at, struct.pack("<q", 4))):
        (tmp_path / "x.idx").write_bytes(damage(GOOD, at, new))
        with pytest.raises(DataError, match="do not lie end to end"):
            TokenFile.open(tmp_path / "x").check_index()
    for value in (-1, 3):
        (tmp_path / "x.idx").write_bytes(damage(GOOD, documents_at + 8, struct.pack("<q", value)))
        with pytest.raises(DataError, match="documents do not cover"):
            TokenFile.open(tmp_path / "x").check_index()


def test_an_empty_pair_opens(tmp_path: Path) -> None:
    file = TokenFile.open(write(tmp_path / "x", []))
    file.check_index()
    assert (file.num_tokens, file.num_sequences, file.num_documents) == (0, 0, 0)


def test_the_writer_leaves_no_other_file(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert isinstance(TokenFile.open(tmp_path / "x").tokens, np.memmap)


def legacy_idx(lengths: list[int], document_indices: list[int], code: int = 4, item_bytes: int = 4) -> bytes:
    """As `IndexedDatasetBuilder.finalize` of Megatron-DeepSpeed and GPT-NeoX writes it, spelled out."""
    offsets = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    numbers = [range(len(lengths) + 1), offsets, lengths, document_indices]
    return (
        b"TNTIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<QQ", code, item_bytes)
        + struct.pack("<QQ", len(lengths), len(lengths))
        + struct.pack("<Q", len(document_indices))
        + b"".join(np.array(part, dtype=np.int64).tobytes() for part in numbers)
    )


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatrons_former_index_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    tokens = np.arange(1, 11, dtype=dtype)
    (tmp_path / "x.bin").write_bytes(tokens.tobytes())
    (tmp_path / "x.idx").write_bytes(legacy_idx([4, 3, 0, 3], [0, 2, 4], code, tokens.itemsize))
    file = TokenFile.open(tmp_path / "x")
    file.check_index()
    assert [file.document(index).tolist() for index in range(2)] == [list(range(1, 8)), [8, 9, 10]]
    assert file.dtype == np.dtype(dtype)


LEGACY = legacy_idx([2, 2], [0, 1, 2])
HEADER = 56


@pytest.mark.parametrize(
    ("idx", "complaint"),
    [
        (LEGACY[:20], "20 bytes, fewer than its header; .*prepare or copy both files again"),
        (LEGACY[:-1], r"has \d+ bytes where its header says"),
        (LEGACY[:48] + LEGACY[HEADER:], r"has \d+ bytes where its header says"),
        (damage(LEGACY, 8, struct.pack("<Q", 2)), "version 2; only version 1"),
        (damage(LEGACY, 16, struct.pack("<Q", 7)), "dtype code 7, which holds no token ids"),
        (damage(LEGACY, 24, struct.pack("<Q", 8)), "8 bytes for a int32"),
        (damage(LEGACY, 32, struct.pack("<Q", 2**60)), r"has \d+ bytes where its header says"),
        (damage(LEGACY, HEADER + 8, struct.pack("<q", 2)), "more than one dimension"),
        (damage(LEGACY, HEADER + 32, struct.pack("<q", 2**60)), "do not lie end to end"),
        (damage(LEGACY, HEADER + 48, struct.pack("<q", -2)), "an impossible length"),
        (damage(LEGACY, HEADER + 48, struct.pack("<q", 2**60)), "an impossible length"),
    ],
)
def test_a_damaged_index_of_the_former_kind_is_refused(tmp_path: Path, idx: bytes, complaint: str) -> None:
    (tmp_path / "x.idx").write_bytes(idx)
    (tmp_path / "x.bin").write_bytes(bytes(16))
    with pytest.raises(DataError, match=complaint):
        TokenFile.open(tmp_path / "x")


def test_documents_of_the_former_index_are_checked_like_others(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(16))
    (tmp_path / "x.idx").write_bytes(damage(LEGACY, len(LEGACY) - 8, struct.pack("<q", 2**60)))
    with pytest.raises(DataError, match="documents do not cover"):
        TokenFile.open(tmp_path / "x").check_index()
