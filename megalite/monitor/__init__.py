"""Console, metrics files and measurements: receives numbers and writes them; never gathers them from ranks."""
