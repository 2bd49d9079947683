"""Whether each operator computes rightly on this very card, and whether it is faster than torch."""
