"""Model families: the Hugging Face form of each, torch-free."""
