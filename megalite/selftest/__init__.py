"""The self-test: whether each operator is correct on this card, and whether it is faster than torch."""
