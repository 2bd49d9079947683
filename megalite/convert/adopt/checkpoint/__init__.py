"""Checkpoint folders of other programs, which carry the arguments of their run."""
