"""Values of DeepSpeed's `zero_optimization` that the user leaves open, sized by the model."""

from collections.abc import Mapping
from typing import Any

# Megatron-LM's bucket: elements, and elements a data-parallel rank. Latency dominates smaller ones.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
# A buffer as large as a small model would double its gradients, and fragment the heap.
_BUCKETS_PER_MODEL = 4


def with_zero_defaults(zero: Mapping[str, Any], *, numel: int, data: int) -> dict[str, Any]:
    """Return `zero_optimization` with what it leaves open. numel: parameters on this rank; data: data-parallel ranks.

    DeepSpeed's own bucket has 5e8 elements, and a GPU allocates all of them, whatever the model's size.
    """
    even_share = max(2, numel // _BUCKETS_PER_MODEL // 2 * 2)  # DeepSpeed asks for even numbers
    bucket = min(max(_BUCKET, _BUCKET_PER_RANK * data), even_share)
    defaults = {"contiguous_gradients": _needs_contiguous_gradients(zero)}
    return {**dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), bucket), **defaults, **zero}


def _needs_contiguous_gradients(zero: Mapping[str, Any]) -> bool:
    """Return whether the reduction that the user chose works on the contiguous copy of the gradients.

    Other reductions flatten the gradients themselves, so that the copy would be a second one.
    """
    if zero["stage"] == 3:
        return not zero.get("reduce_scatter", True)
    # Without the copy, DeepSpeed synchronizes the device before each overlapped reduction, and all-reduces always.
    reduces = not zero.get("use_multi_rank_bucket_allreduce", True)
    return reduces or not zero.get("reduce_scatter", True) or bool(zero.get("overlap_comm"))
