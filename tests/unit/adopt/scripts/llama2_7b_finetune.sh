#!/bin/bash
# Llama 2 7B, trained on from a converted checkpoint, as docs/llama_mistral of Megatron-LM says.
TP=1
DISTRIBUTED="--nproc_per_node 8 --nnodes 1"
LLAMA="--tensor-model-parallel-size $TP --pipeline-model-parallel-size 1 --seq-length 4096 \
--max-position-embeddings 4096 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 \
--norm-epsilon 1e-5 --normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear \
--no-position-embedding --no-masked-softmax-fusion --attention-softmax-in-fp32 \
--untie-embeddings-and-output-weights"
torchrun $DISTRIBUTED pretrain_gpt.py $LLAMA --tokenizer-type Llama2Tokenizer --tokenizer-model llama/tokenizer.model \
  --load checkpoints/llama2 --save runs/tuned --finetune --no-load-optim --no-load-rng --exit-on-missing-checkpoint \
  --use-checkpoint-args --micro-batch-size 2 --global-batch-size 64 --lr 2e-5 --lr-decay-style constant \
  --train-iters 2000 --data-path text --bf16 --eval-iters 0
