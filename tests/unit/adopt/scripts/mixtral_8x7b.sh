#!/bin/bash
# Facts of Megatron-LM's example of Mixtral 8x7B.
MOE=(--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm)
SAVE=${SAVE:-runs/mixtral}
LOGS=(--save $SAVE --load $SAVE --no-load-optim)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGS+=(--wandb-project mixtral)
fi
torchrun --nproc_per_node 8 --nnodes ${SLURM_NNODES:-"1"} pretrain_gpt.py --disable-bias-linear --seq-length 4096 \
    --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 \
    --normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights \
    --group-query-attention --num-query-groups 8 --rotary-base 1000000 ${MOE[@]} --tokenizer-type Llama2Tokenizer \
    --tokenizer-model tokenizer.model --data-path text --split 99990,8,2 --micro-batch-size 1 \
    --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine \
    --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 \
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer ${LOGS[@]}
