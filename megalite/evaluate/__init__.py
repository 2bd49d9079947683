"""Measures a model: perplexity on text, and tasks of EleutherAI's lm_eval."""
