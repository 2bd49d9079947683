"""Checkpoints of other programs: which formats are read, what an opened one is, and how a run is made of it."""
