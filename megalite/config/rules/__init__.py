"""Rules that span settings, one file a section of RUN.toml."""
