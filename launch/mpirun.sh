#!/usr/bin/env bash
# Train with the mpirun of Open MPI, MPICH or Intel MPI, on this machine or on the nodes of a hostfile.
#
#   RUN=examples/quickstart/run.toml launch/mpirun.sh                            one machine
#   RUN=my/run.toml HOSTFILE=my/hostfile launch/mpirun.sh --training.steps 100
#
# Arguments go to `megalite launch`: settings of the run, its options, and behind -- options of mpirun. MPI only starts
# the ranks. Several nodes need ssh by key to each node, and this folder and PYTHON at the same path on all nodes.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # the run to train
PYTHON=${PYTHON:-python3}                   # Python with megalite installed
RANKS=${RANKS:-}                            # one machine: the most ranks to start; empty: those of the run, or its GPUs
HOSTFILE=${HOSTFILE:-}                      # several nodes: their names and ranks, see hostfile.example
MPIRUN=${MPIRUN:-mpirun}                    # where two MPIs are installed: mpirun.openmpi, mpirun.mpich or a full path
MASTER_ADDR=${MASTER_ADDR:-}                # several nodes: the first node, as all reach it; empty: as in the hostfile
MASTER_PORT=${MASTER_PORT:-29500}           # MASTER_PORT of the ranks; they meet at a free one
INTERFACE=${INTERFACE:-}                    # network between the nodes, as in eth0; empty: chosen by the route
EXPORT=${EXPORT:-OMP_NUM_THREADS HF_HOME HF_TOKEN WANDB_API_KEY}    # variables that travel, where they are set
# As root, common in containers, Open MPI needs: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# --- Nothing below needs an edit. ---
fail() {
    echo "error: $1" >&2
    exit 2
}
export MPIRUN
options=(--backend mpirun --port "$MASTER_PORT")
if [[ -n $HOSTFILE ]]; then
    [[ -z $RANKS ]] || fail "RANKS: with HOSTFILE the run's layout is the number of ranks, and a slot runs one; unset RANKS"
    options+=(--hostfile "$HOSTFILE")
else
    options+=(--local ${RANKS:+--slots "$RANKS"})
fi
[[ -z $MASTER_ADDR ]] || options+=(--master "$MASTER_ADDR")
[[ -z $INTERFACE ]] || options+=(--interface "$INTERFACE")
for name in $EXPORT; do
    [[ ! -v $name ]] || options+=(--export "$name")
done
exec "$PYTHON" -m megalite launch "$RUN" "${options[@]}" "$@"
