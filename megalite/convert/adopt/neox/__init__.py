"""Configurations of GPT-NeoX."""
