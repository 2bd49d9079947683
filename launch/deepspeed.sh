#!/usr/bin/env bash
# Train with the deepspeed launcher, on this machine or on the nodes of a hostfile.
#
#   RUN=examples/quickstart/run.toml RANKS=8 launch/deepspeed.sh                 one machine
#   RUN=my/run.toml HOSTFILE=my/hostfile launch/deepspeed.sh --training.steps 100
#
# Arguments go to `megalite train`. Several nodes need pdsh on this node, ssh by key from it to every node of the hostfile
# (itself included), and this folder and PYTHON at the same path on all nodes.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # the run to train
PYTHON=${PYTHON:-python3}                   # Python with megalite installed
RANKS=${RANKS:-8}                           # one machine: tensor x pipeline x data ranks of the run
HOSTFILE=${HOSTFILE:-}                      # several nodes: their names and ranks, see hostfile.example
MASTER_PORT=${MASTER_PORT:-29500}           # free port on the first node; each job on it needs its own
# Several nodes: deepspeed passes on only variables named PYTHON... and, with GPUs, NCCL... Write others, such as
# GLOO_SOCKET_IFNAME=eth0, to ~/.deepspeed_env as KEY=value lines without comments or empty lines.

options=(--master_port "$MASTER_PORT" --log_level error --no_local_rank)
if [[ -n $HOSTFILE ]]; then
    # If the file is missing, deepspeed silently trains on this node alone.
    [[ -r $HOSTFILE ]] || { echo "error: HOSTFILE: $HOSTFILE cannot be read" >&2; exit 2; }
    options+=(--hostfile "$HOSTFILE")
else
    options+=(--hostfile /dev/null --num_gpus "$RANKS")    # the number of ranks, also without GPUs
fi
exec "$PYTHON" -m deepspeed.launcher.runner "${options[@]}" --module megalite train "$RUN" "$@"
