#!/bin/bash
# Facts of Megatron-LM's example of Llama 3 8B, in bf16 on one machine.
CHECKPOINTS=${1:-"runs/llama3_8b"}
TOKENIZER=${2:-"llama3"}
DTYPE="bf16"
TP=2

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --normalization RMSNorm --init-method-std 0.0134
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218816 --lr-warmup-samples 3906304
    --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --exit-duration-in-mins 235
)
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING_ARGS+=("--fp8-format hybrid" "--fp8-amax-history-len 1024")
elif [[ "$DTYPE" == "bf16" ]]; then
    TRAINING_ARGS+=("--bf16")
fi
PARALLEL=(--tensor-model-parallel-size $TP --context-parallel-size 1)
if [ $TP -gt 1 ]; then PARALLEL+=(--sequence-parallel); fi
PARALLEL+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
DATA_ARGS=("--data-path text" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER" "--split '99,1,0'")
[ -f "pretrain_gpt.py" ] || exit 1

torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${PARALLEL[@]} \
    ${DATA_ARGS[@]} --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 \
    --ckpt-format torch_dist --save "$CHECKPOINTS" --load "$CHECKPOINTS"
set +x
