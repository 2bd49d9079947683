#!/usr/bin/env bash
# Train under the deepspeed launcher: on this machine, or on the nodes of a hostfile.
#
#   RUN=examples/quickstart/run.toml RANKS=8 launch/deepspeed.sh                 one machine
#   RUN=my/run.toml HOSTFILE=my/hostfile launch/deepspeed.sh --training.steps 100
#
# Arguments go to `megalite train`. Several nodes need pdsh here, ssh by key from here to every node of the hostfile
# (this one included), and this folder and PYTHON at the same path on all of them.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # what to train
PYTHON=${PYTHON:-python3}                   # the interpreter that megalite is installed for
RANKS=${RANKS:-8}                           # one machine: tensor x pipeline x data ranks of the run
HOSTFILE=${HOSTFILE:-}                      # several: their names and ranks, see hostfile.example
MASTER_PORT=${MASTER_PORT:-29500}           # free on the first node; another one for a second job there
# Several nodes: of the variables set here deepspeed passes on PYTHON... and, with GPUs, NCCL... only. Write others,
# such as GLOO_SOCKET_IFNAME=eth0, as KEY=value lines without comments or empty lines to ~/.deepspeed_env.

options=(--master_port "$MASTER_PORT" --log_level error --no_local_rank)
if [[ -n $HOSTFILE ]]; then
    # Without the file deepspeed would train alone here, and say that all is well.
    [[ -r $HOSTFILE ]] || { echo "error: HOSTFILE: $HOSTFILE cannot be read" >&2; exit 2; }
    options+=(--hostfile "$HOSTFILE")
else
    options+=(--hostfile /dev/null --num_gpus "$RANKS")    # ranks, on a machine without GPUs too
fi
exec "$PYTHON" -m deepspeed.launcher.runner "${options[@]}" --module megalite train "$RUN" "$@"
