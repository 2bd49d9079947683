"""Configurations that are one mapping of keys: read safely, and those of Trainer, LLaMA-Factory and axolotl."""
