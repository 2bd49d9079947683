"""Checkpoints of other programs, read and written."""
