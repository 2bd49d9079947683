"""Who this rank is: its launcher, its number, its address and its place on the host."""
