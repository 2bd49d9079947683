"""The batches of a step from token files or a stream; in loader.py alone torch is imported."""
