"""The split of documents into train, validation and test, by a hash of the seed and the document's number."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """The shares of the documents for the first len(shares) of PARTS; they sum to one.

    The part of a document depends on the seed and on its number only, so text added at the end moves no document.
    """

    shares: tuple[float, ...] = (1.0,)
    seed: int = 0

    def part(self, document: int) -> int:
        """Return the part of a document, as an index into PARTS."""
        if len(self.shares) == 1:
            return 0
        digest = hashlib.blake2b(f"{self.seed}:split:{document}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest, "little") / 2**64
        # The last share takes what rounding leaves over.
        return bisect_right(list(accumulate(self.shares[:-1])), drawn)

    def fills_all(self, documents: Iterable[object]) -> bool:
        """Whether every part gets one of the documents; takes no more of them than it needs."""
        missing = set(self.parts)
        for number, _ in enumerate(documents):
            missing.discard(self.part(number))
            if not missing:
                return True
        return False

    @property
    def parts(self) -> list[int]:
        """The parts with a share above 0, as indices into PARTS."""
        return [index for index, share in enumerate(self.shares) if share > 0]


WHOLE = Split()
