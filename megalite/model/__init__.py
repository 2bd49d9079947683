"""The Transformer, written like single-device code: parallel layers know the ranks, these files do not."""
