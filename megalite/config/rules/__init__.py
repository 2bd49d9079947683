"""Rules that span settings, one file a subject; `every.py` lists them all."""
