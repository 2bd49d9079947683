"""Resumable state in files that know nothing of the layout, and its export to Hugging Face's format."""
