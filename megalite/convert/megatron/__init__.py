"""Megatron-LM checkpoints, read."""
