"""The pairwise table of runs: its axes, its rows, and the comparison of a row with one process."""
