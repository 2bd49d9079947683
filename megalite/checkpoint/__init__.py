"""Resumable state in files that know nothing of the layout.

`checkpoints/step-000100/` holds `manifest.json` (every canonical tensor's true shape, its shards with offsets
and hashes) and one safetensors file a rank. Exactly one rank writes each element, ZeRO's partitions as flat
ranges of a shard, without gathering; a rank that loads fills what it holds from whatever shards overlap it. The
manifest is untrusted: every field is checked, nothing outside its folder is read, no allocation is larger than
the files. A checkpoint is published by one rename after a dry check of the coverage; `latest` is written last.

Saving and loading take (folder, replica, optimizer state). An asynchronous checkpoint lists its tensors, begins
to copy them and returns; the update of the step waits for the copy. Each rank's thread writes and syncs its
file and takes part in no collective: the flags that ranks sum between two steps say when all have written, and
then rank 0's thread checks, publishes, moves `best` and deletes what is not kept. One save is in flight at a
time.
"""
