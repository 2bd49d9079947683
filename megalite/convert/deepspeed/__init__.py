"""Folders that DeepSpeed's engine saved (engine.save_checkpoint), read without DeepSpeed."""
