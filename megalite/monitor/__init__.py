"""What a run says about itself: it receives numbers and writes them down; it never gathers them from ranks."""
