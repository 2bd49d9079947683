"""DeepSpeed's JSON: read, checked, handed over."""
