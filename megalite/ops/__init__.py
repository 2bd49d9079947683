"""The operators a training step is made of, one file each, named for what they compute."""
