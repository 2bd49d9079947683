"""DeepSpeed's universal checkpoints, read and written."""
