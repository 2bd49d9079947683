"""The preparation before any contender is measured, in processes of its own."""

from pathlib import Path


def write_weights(path: Path) -> None:
    from benchmarks.peers.llama import write_initial_weights

    write_initial_weights(path)


def build_deepspeed_operators() -> bool:
    """Build DeepSpeed's AdamW and its collectives over shared memory, as it does on first use; False: it cannot."""
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder.cpu import FusedAdamBuilder

    FusedAdamBuilder().load(verbose=False)
    return build_shm_op() is not None
