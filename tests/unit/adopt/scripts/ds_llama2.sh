#!/bin/bash
# Facts of Megatron-DeepSpeed's example of Llama 2: grouped heads by --num-key-value-heads, ZeRO off, pipeline 2.
BASE=./tmp
DS_CONFIG=${BASE}/deepspeed.json
TP=2
PP=2
ZERO_STAGE=0
MICRO=4
GLOBAL=32
activation_checkpoint="false"
cat <<EOT > $DS_CONFIG
{
  "train_batch_size" : $GLOBAL,
  "train_micro_batch_size_per_gpu": $MICRO,
  "steps_per_print": 1,
  "zero_optimization": { "stage": $ZERO_STAGE },
  "bf16": { "enabled": true }
}
EOT
ds_args=""
ds_args=" --deepspeed ${ds_args}"
ds_args=" --deepspeed_config=$DS_CONFIG ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
if [ "${activation_checkpoint}" = "true" ]; then
  ds_args="--deepspeed-activation-checkpointing ${ds_args}"
fi
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --tensor-model-parallel-size $TP \
  --pipeline-model-parallel-size $PP --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 \
  --num-attention-heads 16 --micro-batch-size $MICRO --global-batch-size $GLOBAL --seq-length 2048 \
  --max-position-embeddings 2048 --train-iters 250000 --save runs/llama --load runs/llama --data-path 1 text \
  --data-impl mmap --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --split 949,50,1 \
  --distributed-backend nccl --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 \
  --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 10000 \
  --eval-interval 1000 --eval-iters 10 --bf16 --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 \
  --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm \
  --disable-bias-linear --num-key-value-heads 4 $ds_args
