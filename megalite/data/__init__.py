"""From text to the token batches of a step; only loader.py imports torch."""
