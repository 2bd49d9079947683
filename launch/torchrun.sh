#!/usr/bin/env bash
# Train with torchrun, on this machine or on several nodes; start it on each node.
#
#   RUN=examples/quickstart/run.toml RANKS=8 launch/torchrun.sh                  one machine
#   NODES=2 MASTER=node-a RUN=my/run.toml launch/torchrun.sh                     this command on every node
#   NODES=2 MASTER=node-a RESTARTS=3 RUN=my/run.toml launch/torchrun.sh          a failed job starts again, three times
#
# Arguments go to `megalite train`.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # the run to train
PYTHON=${PYTHON:-python3}                   # Python with megalite installed
RANKS=${RANKS:-8}                           # ranks on each node; over all nodes tensor x pipeline x data
NODES=${NODES:-1}                           # number of nodes
MASTER=${MASTER:-}                          # several nodes: the rendezvous node, by a name that all nodes reach
MASTER_PORT=${MASTER_PORT:-29400}           # several nodes: a free port on that node
JOB=${JOB:-megalite}                        # several nodes: the rendezvous id, different for each job on that node
GRACE=${GRACE:-300}                         # seconds to save in after SIGTERM, more than launch.grace_seconds
RESTARTS=${RESTARTS:-0}                     # how often all ranks start again, from the last checkpoint, after a failure
INTERFACE=${INTERFACE:-}                    # network between the nodes, as in eth0; empty: chosen by the route

# --- Nothing below needs an edit. ---
# torchrun's default, set here to avoid its warning: megalite divides the cores among the ranks itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ -n $INTERFACE ]]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME="=$INTERFACE"    # to NCCL a bare eth1 is eth10 too
fi
options=(--nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts "$RESTARTS" --shutdown-timeout "$GRACE")
if ((NODES == 1)); then
    options+=(--standalone)
else
    [[ -n $MASTER ]] || { echo "error: MASTER: set it to the first of the $NODES nodes, as in MASTER=node-a" >&2; exit 2; }
    options+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER:$MASTER_PORT" --rdzv-id "$JOB")
fi
exec "$PYTHON" -m torch.distributed.run "${options[@]}" -m megalite train "$RUN" "$@"
