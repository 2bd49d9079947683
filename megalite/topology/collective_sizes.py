"""The sizes of collectives, for the code that runs them and for the memory model. No torch."""

# Large enough to hide the latency of a collective, small enough not to double the gradients' memory.
COLLECTIVE_BYTES = 64 << 20
# The least weights of a gradient bucket. About DDP's: large enough for the bandwidth, small enough to start early.
BUCKET_BYTES = 25 << 20
