"""A table of user mistakes: one module per subject, each a list of Case."""
