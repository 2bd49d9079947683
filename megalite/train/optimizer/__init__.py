"""What updates the weights: torch alone, or DeepSpeed with ZeRO."""
