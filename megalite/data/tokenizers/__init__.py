"""Tokenizers: loaded, imported, trained; and texts in pieces with the same ids."""
