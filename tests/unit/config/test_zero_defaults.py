"""DeepSpeed's values that the user leaves open are sized by the model; the ones that are set stay."""

import pytest

from megalite.config.deepspeed.zero_defaults import with_zero_defaults


@pytest.mark.parametrize(
    ("numel", "data", "bucket"),
    [(17_000_002, 2, 4_250_000), (7_000_000_000, 8, 40_000_000), (7_000_000_000, 64, 64_000_000), (3, 2, 2)],
)
def test_a_bucket_is_a_quarter_of_a_small_model_and_megatrons_of_a_large_one(
    numel: int, data: int, bucket: int
) -> None:
    zero = with_zero_defaults({"stage": 2}, numel=numel, data=data)
    assert zero == {
        "stage": 2,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "contiguous_gradients": False,
    }


def test_what_is_set_stays() -> None:
    given = {"stage": 3, "reduce_bucket_size": 7, "allgather_bucket_size": 8, "contiguous_gradients": True}
    assert with_zero_defaults(given, numel=1000, data=2) == given


@pytest.mark.parametrize(
    ("given", "contiguous"),
    [
        ({"stage": 1}, False),
        ({"stage": 2, "overlap_comm": True}, True),
        ({"stage": 2, "reduce_scatter": False}, True),
        ({"stage": 2, "use_multi_rank_bucket_allreduce": False}, True),
        ({"stage": 3, "overlap_comm": True}, False),
        ({"stage": 3, "reduce_scatter": False}, True),
    ],
)
def test_gradients_are_copied_together_only_for_a_reduction_that_works_on_the_copy(
    given: dict[str, object], contiguous: bool
) -> None:
    assert with_zero_defaults(given, numel=1000, data=2)["contiguous_gradients"] is contiguous
