"""Optimizers: torch alone, or DeepSpeed with ZeRO."""
