"""Text from a checkpoint or a Hugging Face folder."""
