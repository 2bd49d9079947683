"""Scripts of Megatron-LM and Megatron-DeepSpeed."""
