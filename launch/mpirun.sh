#!/usr/bin/env bash
# Train with Open MPI's mpirun, on this machine or on the nodes of a hostfile. MPI only starts the ranks.
#
#   RUN=examples/quickstart/run.toml RANKS=8 launch/mpirun.sh                    one machine
#   RANKS=16 HOSTFILE=my/hostfile MASTER_ADDR=node-a RUN=my/run.toml launch/mpirun.sh
#
# Arguments go to `megalite train`. Several nodes need ssh by key to each node, and this folder and PYTHON at the same
# path on all nodes. For MPICH: `mpiexec -n RANKS -f HOSTFILE -genv MASTER_ADDR ...`, with `host:slots` in the hostfile.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # the run to train
PYTHON=${PYTHON:-$(command -v python3)}     # Python with megalite installed, by its full path
RANKS=${RANKS:-8}                           # number of ranks: tensor x pipeline x data
HOSTFILE=${HOSTFILE:-}                      # several nodes: see hostfile.example
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}       # several nodes: the hostfile's first node, by a name that all nodes reach
MASTER_PORT=${MASTER_PORT:-29500}           # a free port on that node
# As root, common in containers: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

export MASTER_ADDR MASTER_PORT
options=(-n "$RANKS" -x MASTER_ADDR -x MASTER_PORT)
for name in PATH PYTHONPATH GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME; do
    [[ -z ${!name:-} ]] || options+=(-x "$name")
done
if [[ -n $HOSTFILE ]]; then
    [[ -r $HOSTFILE ]] || { echo "error: HOSTFILE: $HOSTFILE cannot be read" >&2; exit 2; }
    [[ $MASTER_ADDR != 127.* ]] || { echo "error: MASTER_ADDR: name the first node of $HOSTFILE" >&2; exit 2; }
    options+=(--hostfile "$HOSTFILE")
else
    options+=(--oversubscribe --bind-to none)    # allow more ranks than cores
fi
exec mpirun "${options[@]}" "$PYTHON" -m megalite train "$RUN" "$@"
