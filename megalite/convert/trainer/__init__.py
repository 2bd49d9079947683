"""Checkpoint folders of Hugging Face's Trainer: found, and imported with the optimizer's state."""
