"""The pairwise table of runs: what varies, which rows it has, and how a row is held against one process."""
