#!/usr/bin/env bash
# Train under torchrun: on this machine, or, started on each of several nodes, on all of them.
#
#   RUN=examples/quickstart/run.toml RANKS=8 launch/torchrun.sh                  one machine
#   NODES=2 MASTER=node-a RUN=my/run.toml launch/torchrun.sh                     the same on every node
#
# Arguments go to `megalite train`.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # what to train
PYTHON=${PYTHON:-python3}                   # the interpreter that megalite is installed for
RANKS=${RANKS:-8}                           # ranks on each node; over all nodes tensor x pipeline x data
NODES=${NODES:-1}                           # how many nodes
MASTER=${MASTER:-}                          # several: the node where they meet, by a name that all can reach
MASTER_PORT=${MASTER_PORT:-29400}           # several: a free port there
JOB=${JOB:-megalite}                        # several: another name for a second job that meets there
# Several nodes: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network between them if there is more than one.

# torchrun's own default, set here to spare its notice: megalite shares the cores among the ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
options=(--nnodes "$NODES" --nproc-per-node "$RANKS")
if ((NODES == 1)); then
    options+=(--standalone)
else
    [[ -n $MASTER ]] || { echo "error: MASTER: name the node where $NODES nodes meet" >&2; exit 2; }
    options+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER:$MASTER_PORT" --rdzv-id "$JOB")
fi
exec "$PYTHON" -m torch.distributed.run "${options[@]}" -m megalite train "$RUN" "$@"
