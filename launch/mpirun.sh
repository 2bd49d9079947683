#!/usr/bin/env bash
# Train with the mpirun of Open MPI, MPICH or Intel MPI, on this machine or on the nodes of a hostfile.
#
#   RUN=examples/quickstart/run.toml RANKS=8 launch/mpirun.sh                    one machine
#   RUN=my/run.toml HOSTFILE=my/hostfile launch/mpirun.sh --training.steps 100
#
# Arguments go to `megalite train`. MPI only starts the ranks. Several nodes need ssh by key to each node, and this folder
# and PYTHON at the same path on all nodes.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # the run to train
PYTHON=${PYTHON:-$(command -v python3)}     # Python with megalite installed, by its full path
RANKS=${RANKS:-}                            # tensor x pipeline x data ranks of the run; empty: all slots, or 8
HOSTFILE=${HOSTFILE:-}                      # several nodes: their names and ranks, see hostfile.example
MPIRUN=${MPIRUN:-mpirun}                    # where two MPIs are installed: mpirun.openmpi, mpirun.mpich or a full path
MASTER_ADDR=${MASTER_ADDR:-}                # the first node, by a name that all nodes reach; empty: that of the hostfile
MASTER_PORT=${MASTER_PORT:-29500}           # a free port on that node; each job on it needs its own
INTERFACE=${INTERFACE:-}                    # network between the nodes, as in eth0; empty: chosen by the route
EXPORT=${EXPORT:-PATH PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS HF_HOME HF_TOKEN WANDB_API_KEY}    # Open MPI: what travels
# As root, common in containers, Open MPI needs: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# --- Nothing below needs an edit. ---
fail() {
    echo "error: $1" >&2
    exit 2
}
command -v "$MPIRUN" >/dev/null || fail "MPIRUN: there is no $MPIRUN; install Open MPI or MPICH"
slots=""
if [[ -n $HOSTFILE ]]; then
    [[ -r $HOSTFILE ]] || fail "HOSTFILE: $HOSTFILE cannot be read"
    # MPICH's form of the hostfile: node-a:8
    slots=$(sed -nE 's/^[[:space:]]*([^#[:space:]]+)[[:space:]]+slots=([0-9]+).*/\1:\2/p' "$HOSTFILE")
    [[ -n $slots ]] || fail "HOSTFILE: $HOSTFILE names no node; write lines such as 'node-a slots=8'"
    RANKS=${RANKS:-$(awk -F: '{ sum += $NF } END { print sum }' <<<"$slots")}
    MASTER_ADDR=${MASTER_ADDR:-${slots%%:*}}
fi
RANKS=${RANKS:-8}
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT
if [[ -n $INTERFACE ]]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
options=(-n "$RANKS")
version=$("$MPIRUN" --version 2>&1)
kind=${version%%$'\n'*}
if [[ $kind == *"Open MPI"* || $kind == *OpenRTE* ]]; then
    for name in MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME $EXPORT; do
        [[ ! -v $name ]] || options+=(-x "$name")
    done
    options+=(--bind-to none)    # megalite divides the cores itself
    if [[ -n $HOSTFILE ]]; then
        options+=(--hostfile "$HOSTFILE")
    else
        options+=(--oversubscribe)    # allow more ranks than cores
    fi
else
    options+=(-genvall)    # all variables travel
    if [[ -n $HOSTFILE ]]; then
        hosts=${slots//$'\n'/,}
        options+=(-hosts "$hosts")
    fi
fi
exec "$MPIRUN" "${options[@]}" "$PYTHON" -m megalite train "$RUN" "$@"
