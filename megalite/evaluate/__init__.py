"""Measures a model: perplexity on text, and accuracy on local task files."""
