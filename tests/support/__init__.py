"""Code that several tests share: the pool of ranks, the comparisons, the tiny model and the planted faults."""
