"""torch.distributed.checkpoint folders: found, read without a process group, and imported from FSDP2 and torchtitan."""
