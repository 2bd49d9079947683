"""Records the samples of megatron-core's data sets for the tests of data.order = "megatron".

Run with megatron-core 0.16.1 (`pip install megatron-core==0.16.1 --no-deps`; its wheel has the compiled helpers):
`python -m tests.support.megatron_core_samples tests/unit/data/batches/megatron_core_samples.npz`.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.files.token_file import TokenWriter, bin_path, idx_path

VOCABULARY = 50_000


@dataclass(frozen=True)
class DataSet:
    """A token file that anyone can write: as many documents as `lengths`, none of them random."""

    name: str
    documents: int
    shortest: int
    longest: int
    dtype: str = "uint16"
    vocabulary: int = VOCABULARY

    def documents_of(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens of each document."""
        start = sum(map(ord, self.name))
        for number in range(self.documents):
            spread = self.longest - self.shortest + 1
            length = self.shortest + (number * 7919 + start * 31) % 104_729 % spread
            yield ((start + np.arange(length)) * 48_271 % 2_147_483_647 % self.vocabulary).astype(self.dtype)
            start += length

    def write(self, folder: Path) -> Path:
        """Write NAME.bin and NAME.idx; return the prefix."""
        prefix = folder / self.name
        with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
            writer = TokenWriter(bin_file, idx_file, np.dtype(self.dtype))
            for document in self.documents_of():
                writer.add(document)
                writer.end_document()
            writer.finish()
            writer.close()
        return prefix


@dataclass(frozen=True)
class Case:
    """Data sets and the settings of a run; sizes: the samples of training, validation and test."""

    sets: Sequence[DataSet]
    sizes: tuple[int, int, int]
    seed: int = 1234
    length: int = 8
    split: str = "969,30,1"
    weights: Sequence[float] | None = None


WEB = DataSet("web", 703, 0, 23)
BOOKS = DataSet("books", 23, 30, 90, "int32")
CODE = DataSet("code", 57, 1, 40)
NOTES = DataSet("notes", 400, 1, 3)

CASES = {
    "one epoch": Case([WEB], (100, 8, 0)),
    "last epoch apart": Case([CODE], (210, 10, 0), seed=7, split="90,10,0"),
    "last epoch mixed in": Case([CODE], (280, 40, 0), seed=7, split="90,10,0"),
    "many epochs of a short text": Case([DataSet("tiny", 3, 2, 4)], (40, 0, 0), length=16, split="100,0,0"),
    "documents longer than a sample": Case([BOOKS], (400, 30, 0), seed=2**32 - 1, split="80,20,0"),
    "short documents": Case([NOTES], (150, 6, 6), length=32, split="98,1,1"),
    "blend of two": Case([WEB, BOOKS], (180, 24, 6), split="80,15,5", weights=[0.3, 0.7]),
    "blend of three": Case([WEB, NOTES, CODE], (240, 12, 0), seed=5, split="90,10,0", weights=[1, 2.5, 0.7]),
    "weight of nearly nothing": Case([WEB, CODE], (150, 12, 0), split="90,10,0", weights=[1.0, 1e-9]),
}
PARTS = ("train", "validation", "test")


def recorded(case: Case, folder: Path) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yield the name of each part and all of its samples, [samples, length + 1], as megatron-core gives them."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    # A tokenizer without a padding id: megatron-core then takes -1, which no text has.
    tokenizer = SimpleNamespace(vocab_size=VOCABULARY, eod=0, unique_identifiers={})
    prefixes = [str(data_set.write(folder)) for data_set in case.sets]
    config = GPTDatasetConfig(
        random_seed=case.seed,
        sequence_length=case.length,
        blend=(prefixes, None if case.weights is None else list(map(float, case.weights))),
        split=case.split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    data_sets = BlendedMegatronDatasetBuilder(GPTDataset, list(case.sizes), lambda: True, config).build()
    for part, size, data_set in zip(PARTS, case.sizes, data_sets, strict=True):
        if size:
            rows = [data_set[place] for place in range(len(data_set))]
            samples = [np.append(row["tokens"].numpy(), row["labels"].numpy()[-1]) for row in rows]
            yield part, np.stack(samples).astype(np.int32)


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    arrays = {}
    for name, case in CASES.items():
        with TemporaryDirectory() as folder:
            for part, samples in recorded(case, Path(folder)):
                arrays[f"{name}: {part}"] = samples
                print(f"{name}: {part}: {samples.shape}")
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
