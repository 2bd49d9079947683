"""Hugging Face folders: export, import, model card."""
