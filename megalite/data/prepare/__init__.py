"""From a source to token files, once, before training."""
