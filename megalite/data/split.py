"""Which documents train, validate and test: by a hash of the seed and the document's place in the corpus."""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """Shares of the documents for each of PARTS, as many as are given; they sum to one.

    A document's part depends on nothing but the seed and how many documents stand before it, so text that is added at
    the end moves none.
    """

    shares: tuple[float, ...] = (1.0,)
    seed: int = 0

    def part(self, document: int) -> int:
        """The index in PARTS of the part that a document belongs to."""
        if len(self.shares) == 1:
            return 0
        digest = hashlib.blake2b(f"{self.seed}:split:{document}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest, "little") / 2**64
        # The last share takes what rounding leaves over.
        return bisect_right(list(accumulate(self.shares[:-1])), drawn)

    @property
    def parts(self) -> list[int]:
        """The parts that get documents at all."""
        return [index for index, share in enumerate(self.shares) if share > 0]


WHOLE = Split()
