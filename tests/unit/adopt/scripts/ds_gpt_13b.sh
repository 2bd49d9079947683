#!/bin/bash
# Facts of Megatron-DeepSpeed's GPT-3 13B in 3D: tensor 4, pipeline 4, a hostfile and a JSON beside the script.
set -ex
TP=4 PP=4
export HOSTS=hostfile
run_cmd="deepspeed --hostfile=$HOSTS pretrain_gpt.py --tensor-model-parallel-size $TP \
  --pipeline-model-parallel-size $PP --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 \
  --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 1024 --train-iters 50000 --lr 1.0e-4 \
  --min-lr 1.0e-5 --lr-decay-style cosine --lr-warmup-iters 375 --data-path text --vocab-file gpt2/vocab.json \
  --merge-file gpt2/merges.txt --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 \
  --init-method-std 0.008 --bf16 --checkpoint-activations --deepspeed --deepspeed_config=ds_config.json \
  --deepspeed-activation-checkpointing --zero-stage 1 $@"
echo ${run_cmd}
eval ${run_cmd}
