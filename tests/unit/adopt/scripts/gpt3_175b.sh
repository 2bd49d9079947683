#!/bin/bash
# Facts of Megatron-LM's example of GPT-3 175B: 96 layers on tensor 8 x pipeline 16, fp16.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
NODES=${NODES:-16}
RANKS=$(($GPUS*$NODES))
OUT=$1
TEXT=$2
VOCABULARY=$3

LAUNCH=( --nproc_per_node $GPUS --nnodes $NODES --master_addr localhost --master_port 29500 )
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto  # flash, fused, unfused or local
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} ${TRAINING[@]} \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
    --data-path $TEXT --vocab-file $VOCABULARY/vocab.json --merge-file $VOCABULARY/merges.txt --split 949,50,1 \
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \
    --save $OUT --load $OUT --tensorboard-dir "$OUT/tensorboard"
