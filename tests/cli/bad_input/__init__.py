"""What a user may get wrong, as a table: one module a subject, each a list of Case."""
