"""The checkpoints of a run: what is saved and kept, and what a resumed run must have in common with it."""
