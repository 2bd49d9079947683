"""The partitions of ZeRO: the weights that the fullest overlaps, found without a look at each of thousands of ranks."""

import random
from itertools import accumulate

from megalite.planner.zero_buffers import largest_overlap


def test_the_fullest_partition_is_that_of_all() -> None:
    generator = random.Random(0)
    for _ in range(300):
        sizes = tuple(generator.choice((1, 7, 64, 1000, 12345)) for _ in range(generator.randint(1, 12)))
        copies = generator.choice((1, 2, 3, 8, 17, 500))
        assert largest_overlap(sizes, copies) == overlap_of_all(sizes, copies), (sizes, copies)
    assert largest_overlap((), 4) == 0


def overlap_of_all(sizes: tuple[int, ...], copies: int) -> int:
    """Look at every partition."""
    ends = list(accumulate(sizes))
    share = ends[-1] / copies
    return max(
        sum(
            size
            for size, end in zip(sizes, ends, strict=True)
            if end > rank * share and end - size < (rank + 1) * share
        )
        for rank in range(copies)
    )


def test_a_partition_costs_the_same_among_a_hundred_million() -> None:
    assert largest_overlap((3 * 10**8, 5 * 10**8), 10**8) == 5 * 10**8
    assert largest_overlap((10**8, 10**8), 2 * 10**8 - 1) == 2 * 10**8
