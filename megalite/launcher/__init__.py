"""Who started this process and what it may use of the machine; no torch."""
