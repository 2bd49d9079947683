"""megalite: a 3D-parallel runtime for training large language models."""

__version__ = "0.1.0"
