#!/bin/bash
#SBATCH --job-name=13B
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
# Facts of bigscience's 13B English run: srun starts one launcher on each node, the arguments stand in one text.
GPUS_PER_NODE=4
NNODES=16
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
OPTIMIZER_ARGS=" \
    --optimizer adam \
    --adam-beta1 0.9 \
    --adam-beta2 0.999 \
    --adam-eps 1e-8 \
    --lr 1e-4 \
    --min-lr 1e-6 \
    --lr-warmup-samples 216_320 \
    --lr-decay-samples 126_953_125 \
    --lr-decay-style cosine \
    --clip-grad 1.0 \
    --weight-decay 1e-1 \
    "
GPT_ARGS=" \
    --num-layers 40 --hidden-size 5120 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 1 --rampup-batch-size 16 16 6_000_000 --global-batch-size 1024 --train-samples 300_000_000 \
    --vocab-file gpt2/vocab.json --merge-file gpt2/merges.txt --loss-scale 12 --init-method-std 0.01 --fp16 \
    --checkpoint-activations $OPTIMIZER_ARGS --exit-duration-in-mins 1190"
cat <<EOT > ds_config.$SLURM_JOBID.json
{"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1024, "gradient_clipping": 1.0,
 "zero_optimization": {"stage": 1},
 "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
          "initial_scale_power": 12},
 "steps_per_print": 2000, "wall_clock_breakdown": false}
EOT
DEEPSPEED_ARGS="--deepspeed --deepspeed_config ds_config.$SLURM_JOBID.json --zero-stage 1 --deepspeed-activation-checkpointing"
export LAUNCHER="python -u -m torch.distributed.launch --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES \
    --master_addr $MASTER_ADDR --master_port 6000"
export CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 $GPT_ARGS \
    --save runs/13b --load runs/13b --data-path text --data-impl mmap --split 900,100,0 $DEEPSPEED_ARGS"
echo $CMD
srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a out.txt
