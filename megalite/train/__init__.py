"""One trainer for everything: the loop, the optimizers behind one protocol, local ranks.

- A loader's thread copies the batch from pinned memory to the device, on a stream of its own, steps ahead.
- With `data.length_buckets` the number of a step alone decides its shape [M * b * (S // L), L], the same on
  every rank. With `data.streaming` row r of every global batch comes from lane r, an equal part of the files,
  so that any layout has the same tokens; rank 0 gathers the lanes' places into a checkpoint's manifest.
- The pipeline knows the loss as an `Objective`: a function of the loss sum of each row. `NextToken` takes the
  weights into the loss mask; `Preference` (DPO) compares the two rows of a pair with the reference's sums,
  which the batch carries.
- AdamW updates float32 masters of bf16 and fp16 parameters; a checkpoint carries them under the state key
  "master". With compiled operators linears add to float32 gradients themselves, and one pass updates masters
  and rounds them.
- DeepSpeed's norm is made right by `mpu` and the marks that `ShardSpec` gives. ZeRO 1 takes no part in forward
  and backward: our buckets sum its gradients during the last backward, and `reduce_gradients` cuts the sums into
  DeepSpeed's partitions. ZeRO 2 and 3 reduce in every backward, so `optimizer.wrap(stage)` gives the pipeline the
  engine's forward. `tests/distributed/test_deepspeed_fields.py` names each private field of DeepSpeed that is used.
"""
