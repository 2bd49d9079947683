#!/bin/bash
# The same model as an earlier example trained it: its batch grows over the first samples.
python -m torch.distributed.launch --nproc_per_node 8 --nnodes 16 --node_rank $SLURM_PROCID pretrain_gpt.py \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288 \
    --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 \
    --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 146484375 \
    --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine \
    --log-interval 10 --eval-iters 40 --eval-interval 1000 --data-path text --vocab-file gpt2/vocab.json \
    --merge-file gpt2/merges.txt --save-interval 1000 --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 \
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --tensorboard-dir tb --fp16 \
    --activations-checkpoint-method uniform
