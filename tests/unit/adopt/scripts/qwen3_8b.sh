#!/bin/bash
# Facts of Megatron-LM's configuration of Qwen3 8B: heads of 128 with normed queries and keys, a blend of texts.
SEQ=${SEQ:-32768}
MODEL_OPTIONS="\
  --seq-length $SEQ --max-position-embeddings 40960 --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 \
  --num-attention-heads 32 --kv-channels 128 --group-query-attention --num-query-groups 8 \
  --normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm --position-embedding-type rope --rotary-base 1000000 \
  --use-rotary-position-embeddings --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
  --attention-dropout 0.0 --hidden-dropout 0.0 --make-vocab-size-divisible-by 128 \
  --optimizer adam --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 --lr 1e-6 --min-lr 1e-7 \
  --lr-warmup-samples 0 --clip-grad 1.0 --weight-decay 0.01 --recompute-granularity selective \
  --recompute-activations --recompute-modules core_attn"
python pretrain_gpt.py $MODEL_OPTIONS --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen --bf16 \
  --micro-batch-size 1 --global-batch-size 256 --train-iters 100 --reset-attention-mask --reset-position-ids \
  --data-path 0.3 wiki 0.7 code --split 1,0,0 --tensor-model-parallel-size 4 \
  --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 20
