"""Every setting of a run: its type, limits, default and sentence; and its value before and after the check."""
