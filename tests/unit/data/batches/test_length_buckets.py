"""Length buckets: the least padding, one length a step, the same samples in every layout, none lost or repeated."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.batches.bucket_loader import BucketLoader
from megalite.data.batches.conversation_rows import ConversationRows
from megalite.data.batches.length_buckets import buckets_of, fill, length_buckets
from megalite.data.batches.loader import BatchShare, LoadedBatch
from megalite.data.files.token_file import TokenFile, TokenWriter, bin_path, idx_path
from megalite.data.files.trained_tokens import DTYPE
from megalite.errors import DataError

LENGTH, GLOBAL = 96, 4


@given(
    st.lists(st.integers(1, LENGTH), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(1, 3),
)
@settings(max_examples=200)
def test_no_other_lengths_pad_less(given_lengths: list[int], count: int, size: int) -> None:
    lengths = np.array(given_lengths)
    buckets = length_buckets(lengths, LENGTH, size, count)
    assert len(buckets) <= count and sorted(np.concatenate([b.members for b in buckets])) == list(
        range(len(lengths))
    )
    for bucket, shorter in zip(buckets, [0, *(b.length for b in buckets)], strict=False):
        assert (
            bucket.rows == size * (LENGTH // bucket.length) and bucket.rows * bucket.length <= size * LENGTH
        )
        assert (lengths[bucket.members] <= bucket.length).all() and (lengths[bucket.members] > shorter).all()
    possible = range(8, LENGTH + 1, 8)
    least = sum(len(b.members) * b.length for b in buckets)
    for others in range(1, min(count, 3) + 1):
        for chosen in itertools.combinations(possible, others):
            if not chosen[-1] - 8 < lengths.max() <= chosen[-1]:
                continue
            held = Counter(np.searchsorted(chosen, lengths).tolist())
            if all(held[i] >= size * (LENGTH // each) for i, each in enumerate(chosen)):
                assert least <= sum(held[i] * each for i, each in enumerate(chosen))


def test_a_bucket_repeats_no_conversation_in_a_batch_if_there_are_enough() -> None:
    for short, expected in ((3, [96]), (4, [56, 96]), (47, [16, 96]), (48, [8, 96])):
        lengths = np.array([3] * short + [90] * 100)  # a batch has 48 rows of length 8, 24 of 16, 4 of 56
        assert [b.length for b in length_buckets(lengths, LENGTH, GLOBAL, 8)] == expected
    assert [b.length for b in length_buckets(np.array([3, 3]), LENGTH, GLOBAL, 8)] == [8]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """300 conversations of 2 to 97 tokens; the first token of each is its number."""
    prefix: Path = tmp_path_factory.mktemp("talks") / "talks"
    lengths = np.random.default_rng(1).gamma(1.5, 20, size=300).astype(int).clip(2, LENGTH + 1)
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, DTYPE)
        for number, length in enumerate(lengths.tolist()):
            writer.add(np.array([-1 - number, *range(1000, 1000 + length - 1)], dtype=DTYPE))
            writer.end_document()
        writer.finish()
    return TokenFile.open(prefix)


def loader(file: TokenFile, b: int = GLOBAL, m: int = 1, rank: int = 0, size: int = 1) -> BucketLoader:
    return BucketLoader(file, BatchShare(LENGTH, b, m, rank, size), buckets=4, seed=3)


def read(loader: BucketLoader, step: int) -> LoadedBatch:
    return loader.step_batch(step * GLOBAL)


def test_every_step_has_one_length_and_the_rows_of_the_conversations(file: TokenFile) -> None:
    whole, alone = loader(file), ConversationRows(file, LENGTH, "none", seed=0)
    shapes, indices = set(), []
    for step in range(60):
        batch = read(whole, step)
        rows, length = batch.input_ids.shape
        shapes.add((rows, length))
        assert rows == GLOBAL * (LENGTH // length)
        assert batch.labels.shape == batch.loss_mask.shape == batch.position_ids.shape == (rows, length)
        expected = alone.read(batch.sample_ids.numpy(), pad_id=0)
        assert (batch.input_ids.numpy() == expected.input_ids[:, :length]).all()
        assert (batch.labels.numpy() == expected.labels[:, :length]).all()
        assert (expected.labels[:, length:] == -100).all()
        full = (expected.lengths == length).all()
        assert full if batch.lengths is None else (batch.lengths.numpy() == expected.lengths).all()
        assert (
            batch.document_ids is not None and batch.document_ids.max() <= 1
        )  # the conversation and its padding
        indices += batch.sample_indices.tolist()
    assert 2 <= len(shapes) <= 4 and len(set(indices)) == len(indices)
    lengths = file.document_lengths - 1
    assert fill(lengths, buckets_of(file, LENGTH, GLOBAL, 4)) > 1.5 * alone.fill


def test_in_an_epoch_every_conversation_comes_once_up_to_a_batch_of_each_bucket(file: TokenFile) -> None:
    whole, epochs = loader(file), 5
    buckets = buckets_of(file, LENGTH, GLOBAL, 4)
    steps = whole.steps_for_epochs(epochs)
    seen = Counter(i for step in range(steps) for i in read(whole, step).sample_ids.tolist())
    assert steps == -(-sum(len(b.members) / (LENGTH // b.length) for b in buckets) * epochs // GLOBAL)
    for bucket in buckets:
        times = [seen[i] for i in bucket.members.tolist()]
        assert max(times) - min(times) <= 1
        assert abs(sum(times) - epochs * len(bucket.members)) < 2 * bucket.rows
    assert whole.steps_for_epochs(epochs, after=3 * GLOBAL) == steps - 3
    assert whole.steps_for_epochs(1, after=steps * GLOBAL) == 0


@pytest.mark.parametrize(("b", "m", "size"), [(1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 1)])
def test_any_layout_and_any_step_has_the_same_samples(file: TokenFile, b: int, m: int, size: int) -> None:
    whole, ranks = loader(file), [loader(file, b, m, rank, size) for rank in range(size)]
    for step in (17, 2, 40):
        expected = read(whole, step)
        found = [read(each, step) for each in ranks]
        rows = b * (LENGTH // expected.input_ids.shape[1])
        for name in ("input_ids", "labels", "sample_indices", "sample_ids", "position_ids"):
            pieces = [
                getattr(batch, name)[micro * rows : (micro + 1) * rows]
                for micro in range(m)
                for batch in found
            ]
            assert [row.tolist() for piece in pieces for row in piece] == getattr(expected, name).tolist()


def test_longer_conversations_are_refused(file: TokenFile) -> None:
    with pytest.raises(
        DataError, match=r"a conversation of 97 tokens, and training.sequence_length = 64 holds"
    ):
        BucketLoader(file, BatchShare(64, 1, 1), buckets=4, seed=0)
