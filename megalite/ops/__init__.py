"""The operators of a training step, one file each, named after their operation."""
