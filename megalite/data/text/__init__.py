"""Sources: files, rows and documents, before any tokenizer."""
