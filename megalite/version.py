"""The version of megalite, which checkpoints, model cards and `--version` name."""

__version__ = "0.1.0"
