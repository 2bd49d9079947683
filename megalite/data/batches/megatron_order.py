"""The samples of `data.order = "megatron"`: those of megatron-core's GPTDataset and BlendedDataset, in their order.

A data set is the token stream of its sequences, repeated for as many epochs as the run needs and shuffled over all of
them (the last epoch separately, if less than 80% of it is needed). Sample i is the S + 1 tokens from i * S on, and a
second shuffle orders the samples. A blend takes every next sample from the set that is furthest behind its weight.
Both shuffles are numpy's RandomState of the seed, whose numbers are frozen (NEP 19).

The indices depend on the number of samples, so a run builds them once: `prepare_samples` writes numpy files that every
rank maps. Source: megatron-core 0.16.1, datasets/gpt_dataset.py, blended_megatron_dataset_builder.py, helpers.cpp.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.sections.schema import RunConfig
from megalite.data.files.fingerprint import content_fingerprint
from megalite.data.files.token_file import TokenFile, idx_path
from megalite.errors import DataError

_VERSION = 1  # of the files below; another number builds them anew
_SEPARATE_LAST_EPOCH = 0.80
_SURPLUS = 0.005  # further samples of a blended set (mid_level_dataset_surplus)
_LARGEST_INT32 = 2**31 - 1
_FEW_SETS = 16  # up to here a loop over the sets is faster than numpy's calls
_FILES = ("documents", "ends", "samples")
_BLEND = "blend"


@dataclass(frozen=True)
class MegatronOrder:
    """The settings that decide the samples of a data set and their order, beside its token files.

    samples: the number that the run asks for: steps x global batch size. part: 0 training, 1 validation, 2 test.
    split: Megatron's --split, numbers of any sum. weights: of a blend's sets, of any sum; None: a single set.
    """

    seed: int
    sequence_length: int
    samples: int
    part: int = 0
    split: Sequence[float] = (1.0,)
    weights: Sequence[float] | None = None


def training_order(config: RunConfig) -> MegatronOrder:
    """Return the order of the training samples: train-iters x global-batch-size of them."""
    assert config.training.steps is not None, "a rule asks for it"
    return MegatronOrder(
        config.run.seed,
        config.training.sequence_length,
        config.training.steps * config.batch.global_batch_size,
        split=config.data.split or (1.0,),
        weights=None if config.data.blend is None else [part.weight for part in config.data.blend],
    )


def validation_order(config: RunConfig) -> MegatronOrder:
    """Return the order of the samples of all validations: (train-iters // eval-interval + 1) x those of one.

    They are of the second part of data.split, or of the whole of data.validation.
    """
    order, validation = training_order(config), config.validation
    assert config.training.steps and isinstance(validation.every, int) and validation.samples, (
        "rules ask for them"
    )
    samples = (config.training.steps // validation.every + 1) * validation.samples
    if config.data.validation is not None:
        return MegatronOrder(order.seed, order.sequence_length, samples)
    return replace(order, samples=samples, part=1)


@dataclass(frozen=True)
class SetIndex:
    """The order of one data set.

    documents: the sequences of the token file in the order of the stream, int32. ends: the token behind each of them,
    int64. samples: the sample of the stream at each place, uint32 or int64. epoch_tokens: the tokens of one epoch.
    """

    documents: NDArray[np.int32]
    ends: NDArray[np.int64]
    samples: NDArray[Any]
    epoch_tokens: int


def split_ends(split: Sequence[float], part: int, count: int) -> tuple[int, int]:
    """Return the first sequence of a part and the one behind its last; (0, 0) for a part without a share."""
    shares = _normalised([*split, *[0.0] * (3 - len(split))])
    edges = list(accumulate(shares, initial=0.0))
    first, end = edges[part], edges[part + 1]
    return (0, 0) if end <= first else (round(first * float(count)), round(end * float(count)))


def set_sizes(weights: Sequence[float], samples: int) -> tuple[list[int], list[int]]:
    """Return for each set of a blend the samples that it is to give, and those that its index has at least."""
    targets = [ceil(samples * weight) for weight in _normalised(weights)]
    return targets, [ceil(target * (1 + _SURPLUS)) for target in targets]


def set_index(lengths: NDArray[np.int32], first: int, end: int, order: MegatronOrder, name: str) -> SetIndex:
    """Build the index of sequences first to end - 1. lengths: of all sequences in tokens. Raises DataError."""
    tokens, length = int(lengths[first:end].sum(dtype=np.int64)), order.sequence_length
    if not tokens or end > _LARGEST_INT32:
        what = f"has no token in sequences {first} to {end}" if not tokens else f"has {end} sequences"
        raise DataError(f'{name} {what}, of which data.order = "megatron" makes no samples; check data.split')
    epochs = max(1, -(-(order.samples * length + 1) // tokens))
    before_last, of_epoch = ((epochs - 1) * tokens - 1) // length, (tokens - 1) // length
    separate = epochs > 1 and order.samples - before_last < int(_SEPARATE_LAST_EPOCH * of_epoch)
    random = np.random.RandomState(order.seed)
    pieces = []
    for repeats in (epochs - 1, 1) if separate else (epochs,):
        piece = np.tile(np.arange(first, end, dtype=np.int32), repeats)
        random.shuffle(piece)
        pieces.append(piece)
    documents = np.concatenate(pieces)
    total = (epochs * tokens - 1) // length
    dtype = np.uint32 if total < 2**32 - 2 else np.int64
    edges = [0, before_last, total] if separate else [0, total]
    shuffled = [np.arange(*pair, dtype=dtype) for pair in pairwise(edges)]
    for part in shuffled:
        random.shuffle(part)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    return SetIndex(documents, ends, np.concatenate(shuffled), tokens)


def blend_index(weights: Sequence[float], size: int) -> NDArray[np.int16]:
    """Return the set of each of `size` samples: the first of those that are furthest behind their weight.

    A loop over the samples: every step rounds in float64 as Megatron does, and ties depend on it.
    """
    shares, count = _normalised(_normalised(weights)), len(weights)
    chosen = np.zeros(size, dtype=np.int16)
    if count > _FEW_SETS:
        share, taken = np.array(shares), np.zeros(count)
        for place in range(size):
            chosen[place] = best = int((share * float(max(place, 1)) - taken).argmax())
            taken[best] += 1.0
        return chosen
    counts, numbers = [0.0] * count, range(1, count)
    for place in range(size):
        at, best = float(place or 1), 0
        largest = shares[0] * at - counts[0]
        for number in numbers:
            if (behind := shares[number] * at - counts[number]) > largest:
                largest, best = behind, number
        counts[best] += 1.0
        if best:
            chosen[place] = best
    return chosen


class MegatronSamples:
    """The samples of one or more token files at the places of the order; `len` is their number.

    files, indices: of the sets. blend: the set of each place; None: a single set.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        indices: Sequence[SetIndex],
        sequence_length: int,
        blend: NDArray[np.int16] | None = None,
        turns: NDArray[np.int64] | None = None,
    ):
        """turns: how many earlier places of the blend have the same set."""
        self._files, self._indices, self.sequence_length = files, indices, sequence_length
        self._blend, self._turns = blend, turns

    def __len__(self) -> int:
        return len(self._indices[0].samples if self._blend is None else self._blend)

    @property
    def samples_per_epoch(self) -> int:
        """The samples in one epoch of every set, at least 1."""
        return max(1, sum(index.epoch_tokens for index in self._indices) // self.sequence_length)

    def read(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of the samples at these places: [places, S + 1]. DataError for a place behind the last."""
        if len(places) and (last := int(places.max())) >= len(self):
            raise DataError(
                f'data.order = "megatron" has {len(self):,} samples for training.steps, and the run asks for sample '
                f"{last + 1:,}; set training.steps and training.global_batch_size to those of the samples consumed"
            )
        rows = np.empty((len(places), self.sequence_length + 1), dtype=np.int64)
        for row, place in enumerate(places.tolist()):
            number = 0 if self._blend is None else int(self._blend[place])
            turn = place if self._turns is None else int(self._turns[place])
            rows[row] = self._sample(number, turn)
        return rows

    def _sample(self, number: int, turn: int) -> NDArray[Any]:
        """Return the S + 1 tokens of a sample of a set."""
        file, index = self._files[number], self._indices[number]
        start = int(index.samples[turn]) * self.sequence_length
        stop = start + self.sequence_length + 1
        first, last = index.ends.searchsorted(start, side="right"), index.ends.searchsorted(stop)
        sequences = index.documents[first : last + 1]
        begins = file.sequence_offsets[sequences] // file.dtype.itemsize
        counts = file.sequence_lengths[sequences].astype(np.int64)
        skipped = start - int(index.ends[first]) + int(counts[0])
        begins[0] += skipped
        counts[0] -= skipped
        counts[-1] -= int(index.ends[last]) - stop
        places = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(stop - start)
        return np.asarray(file.tokens[places])


def prepare_samples(prefixes: Sequence[Path], order: MegatronOrder, folder: Path) -> MegatronSamples:
    """Return the samples of token files; their indices are built in `folder`, unless they are there, and mapped.

    Raises DataError for a damaged token file, and where a set has too few samples for its share of the blend.
    """
    files = [TokenFile.open(prefix) for prefix in prefixes]
    place = folder / f"megatron-{_key(prefixes, order)}"
    try:
        if not place.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            _write(files, order, place)
        return _mapped(files, order, place)
    except OSError as error:
        raise DataError(
            f"{place}: the order of the samples cannot be written or read ({error.strerror or error}); "
            "check its permissions, the free space and the limit of file sizes (ulimit -f)"
        ) from error
    except (ValueError, EOFError) as error:
        raise DataError(f"{place} is damaged ({error}); delete it, and it is built again") from error


def _write(files: Sequence[TokenFile], order: MegatronOrder, place: Path) -> None:
    """Write the indices to a folder of their own and rename it: another rank sees all or none."""
    weights = order.weights
    targets, sizes = (
        ([order.samples], [order.samples]) if weights is None else set_sizes(weights, order.samples)
    )
    taken = targets
    draft = Path(tempfile.mkdtemp(prefix=".megatron-", dir=place.parent))
    try:
        if weights is not None:
            blend = blend_index(weights, sum(targets))
            turns = np.empty(len(blend), dtype=np.int64)
            for number in range(len(files)):
                rows = np.flatnonzero(blend == number)
                turns[rows] = np.arange(len(rows))
            np.save(draft / f"{_BLEND}.npy", blend)
            np.save(draft / f"{_BLEND}-turns.npy", turns)
            taken = np.bincount(blend, minlength=len(files)).tolist()
        for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
            file.check_index()
            ends = split_ends(order.split, order.part, file.num_sequences)
            of_set = MegatronOrder(order.seed, order.sequence_length, size)
            index = set_index(file.sequence_lengths, *ends, of_set, str(idx_path(file.prefix)))
            if len(index.samples) < taken[number]:
                raise DataError(
                    f"{file.prefix} has {len(index.samples)} samples where the blend takes {taken[number]}; "
                    "Megatron refuses it too: use other weights (data.blend)"
                )
            arrays: tuple[NDArray[Any], ...] = (index.documents, index.ends, index.samples)
            for name, array in zip(_FILES, arrays, strict=True):
                np.save(draft / f"{name}-{number}.npy", array)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _mapped(files: Sequence[TokenFile], order: MegatronOrder, place: Path) -> MegatronSamples:
    """Map what `_write` wrote. Raises OSError, ValueError."""

    def load(name: str) -> NDArray[Any]:
        return np.asarray(np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False))

    indices = []
    for number, file in enumerate(files):
        documents, ends, samples = (load(f"{name}-{number}") for name in _FILES)
        first, end = split_ends(order.split, order.part, file.num_sequences)
        repeats, rest = divmod(len(documents), max(1, end - first))
        tokens = int(ends[-1]) if len(ends) else 0
        if (
            not repeats
            or rest
            or len(ends) != len(documents)
            or len(samples) != (tokens - 1) // order.sequence_length
        ):
            raise ValueError("its arrays do not fit each other")
        indices.append(SetIndex(documents, ends, samples, tokens // repeats))
    blend, turns = (None, None) if order.weights is None else (load(_BLEND), load(f"{_BLEND}-turns"))
    return MegatronSamples(files, indices, order.sequence_length, blend, turns)


def _key(prefixes: Sequence[Path], order: MegatronOrder) -> str:
    """Return a name for what decides the indices: the order, and the lengths in the token files."""
    content = content_fingerprint([idx_path(prefix) for prefix in prefixes])
    fields = [_VERSION, content, order.seed, order.sequence_length, order.samples, order.part]
    fields += [tuple(map(float, order.split)), order.weights and tuple(map(float, order.weights))]
    return hashlib.blake2b(repr(fields).encode(), digest_size=8).hexdigest()


def _normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, rounded as numpy does it."""
    values = np.array(weights, dtype=np.float64)
    shares: list[float] = (values / np.sum(values)).tolist()
    return shares
