"""The record of a step as metrics.jsonl has it."""

from typing import Any


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.0 + 3.0 / step,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens": 1000 * step,
        "tokens_per_second": 2000.0,
        "mfu": 0.64,
        "memory_bytes": 3 * 2**29,
        "step_seconds": 0.5,
        "data_seconds": 0.001,
        **changes,
    }
