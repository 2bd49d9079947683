"""Contenders of `python -m benchmarks.peers`, one module each."""
