#!/bin/bash
# Facts of the scripts of "Efficient Large-Scale Language Model Training" (2021): a size by case, chunks by request.
MODEL=${MODEL:-"18.4B"}
PP=2
INTERLEAVED=YES
EXTRA=""
case $MODEL in
    1.7B) NLS=24; HS=2304; NAH=24 ;;
    18.4B) NLS=40; HS=6144; NAH=48 ;;
    *) echo "unknown model"; exit 1 ;;
esac
if [ "$INTERLEAVED" == "YES" ]; then EXTRA="--num-layers-per-virtual-pipeline-stage 5"; fi
options() {
    OPTIONS="--num-layers ${NLS} --hidden-size ${HS} --num-attention-heads ${NAH} $EXTRA"
}
options
torchrun --nproc_per_node=8 --nnodes=4 pretrain_gpt.py $OPTIONS --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size ${PP} --micro-batch-size 2 --global-batch-size 256 --train-samples 20480 \
    --lr-warmup-samples 0 --lr-decay-samples 20480 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine \
    --seq-length 2048 --max-position-embeddings 2048 --data-path text --vocab-file gpt2/vocab.json \
    --merge-file gpt2/merges.txt --split 949,50,1 --no-query-key-layer-scaling --weight-decay 0.1 --adam-beta1 0.9 \
    --adam-beta2 0.95 --init-method-std 0.006 --fp16 --DDP-impl local --recompute-granularity full \
    --recompute-method block --recompute-num-layers 2 --accumulate-allreduce-grads-in-fp32
