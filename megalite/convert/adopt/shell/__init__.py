"""A launch script in the shell language, read and expanded, never executed."""
