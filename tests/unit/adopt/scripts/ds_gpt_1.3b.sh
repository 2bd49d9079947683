#!/bin/bash
# Facts of Megatron-DeepSpeed's GPT-3 1.3B: length and schedule in tokens, the JSON written by the script.
model_size=1.3
seq_len=2048
global_batch_size=512
batch_size=2
mp_size=2
zero_stage=1
train_tokens_in_billion=300
train_tokens=$((${train_tokens_in_billion} * 1024 * 1024 * 1000))
train_samples=$(( 300 * 1000000000 * 2 / ${seq_len} ))
if [[ $zero_stage -gt 0 ]]; then prescale="false"; else prescale="true"; fi
host="${HOSTNAME}"
checkpoint="runs/gpt_${model_size}B_gbs${global_batch_size}"
log="logs/$(date +%s)_${host}"
mkdir -p ${log}

config_json="ds_config_gbs${global_batch_size}.json"
cat <<EOT > $config_json
{
  "train_batch_size": $global_batch_size,
  "train_micro_batch_size_per_gpu": $batch_size,
  "steps_per_print": 10,
  "zero_optimization": {"stage": $zero_stage, "reduce_bucket_size": 500000000},
  "gradient_clipping": 1.0,
  "prescale_gradients": $prescale,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
           "initial_scale_power": 11},
  "wall_clock_breakdown": false
}
EOT

options=" \
    --override-opt_param-scheduler \
    --adam-beta1 0.9 --adam-beta2 0.95 \
    --tensor-model-parallel-size ${mp_size} \
    --init-method-std 0.013 \
    --lr-decay-tokens 314572800000 --lr-warmup-tokens 3145728000 \
    --micro-batch-size ${batch_size} --global-batch-size ${global_batch_size} \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length ${seq_len} --max-position-embeddings ${seq_len} \
    --train-tokens ${train_tokens} --train-samples ${train_samples} \
    --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 949,50,1 \
    --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 1000 \
    --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234 \
    --load ${checkpoint} --save ${checkpoint} --no-async-tensor-model-parallel-allreduce \
    --tensorboard-queue-size 1 --log-timers-to-tensorboard --tensorboard-dir ${log}"
options="${options} --checkpoint-activations"
options="${options} --data-path text --data-impl mmap --vocab-file gpt2/vocab.json --merge-file gpt2/merges.txt"
options="${options} --deepspeed --deepspeed_config ${config_json} --zero-stage ${zero_stage} --no-pipeline-parallel"
deepspeed --num_gpus 8 --num_nodes 2 pretrain_gpt.py ${options} &>> ${log}/out.log
