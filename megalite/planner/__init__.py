"""Predictions before a run, without torch: memory by kind and rank, operations, layouts and their time."""
