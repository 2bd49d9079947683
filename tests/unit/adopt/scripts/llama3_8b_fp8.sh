#!/bin/bash
# The example of Llama 3 8B as it stands in Megatron-LM: fp8, made-up text, an own rate for the output layer.
DTYPE=fp8
ARGS=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
      --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
      --swiglu --normalization RMSNorm --apply-layernorm-1p --disable-bias-linear --micro-batch-size 1
      --global-batch-size 128 --train-iters 1000 --lr 0.00015 --decoupled-lr 5.0e-4 --bf16)
[[ $DTYPE == fp8 ]] && ARGS+=(--fp8-format hybrid --fp8-amax-compute-algo max)
torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]} --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
