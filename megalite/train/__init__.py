"""One trainer for everything: the loop, the optimizers behind one protocol, local ranks."""
