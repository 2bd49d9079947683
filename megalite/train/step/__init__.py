"""One step of training: the model, optimizer and batches of a rank, and what a step reports."""
