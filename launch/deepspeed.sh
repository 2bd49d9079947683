#!/usr/bin/env bash
# Train with the deepspeed launcher, on this machine or on the nodes of a hostfile.
#
#   RUN=examples/quickstart/run.toml launch/deepspeed.sh                         one machine
#   RUN=my/run.toml HOSTFILE=my/hostfile launch/deepspeed.sh --training.steps 100
#   RUN=my/run.toml HOSTFILE=my/hostfile LAUNCHER=openmpi launch/deepspeed.sh
#
# Arguments go to `megalite launch`: settings of the run, its options, and behind -- options of deepspeed. Several nodes
# need pdsh or an MPI on this node, ssh by key from it to every node of the hostfile (itself included), and this folder
# and PYTHON at the same path on all nodes.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # the run to train
PYTHON=${PYTHON:-python3}                   # Python with megalite installed
RANKS=${RANKS:-}                            # one machine: the most ranks to start; empty: those of the run, or its GPUs
HOSTFILE=${HOSTFILE:-}                      # several nodes: their names and ranks, see hostfile.example
LAUNCHER=${LAUNCHER:-pdsh}                  # several nodes: pdsh, openmpi, mpich, impi; slurm inside an allocation
MASTER_ADDR=${MASTER_ADDR:-}                # several nodes: the first node, as all reach it; empty: as in the hostfile
MASTER_PORT=${MASTER_PORT:-29500}           # the port in deepspeed's own command; the ranks meet at a free one
INTERFACE=${INTERFACE:-}                    # network between the nodes, as in eth0; empty: chosen by the route
EXPORT=${EXPORT:-OMP_NUM_THREADS HF_HOME HF_TOKEN WANDB_API_KEY}    # variables that travel, where they are set
# As root, common in containers, LAUNCHER=openmpi needs: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# --- Nothing below needs an edit. ---
fail() {
    echo "error: $1" >&2
    exit 2
}
options=(--port "$MASTER_PORT")
case $LAUNCHER in
    pdsh) options+=(--backend deepspeed) ;;
    openmpi | mpich | impi | slurm) options+=(--backend "deepspeed-$LAUNCHER") ;;
    *) fail "LAUNCHER: $LAUNCHER is none of pdsh, openmpi, mpich, impi, slurm" ;;
esac
if [[ $LAUNCHER == slurm ]]; then
    [[ -z $HOSTFILE ]] || fail "HOSTFILE: LAUNCHER=slurm uses the nodes of the allocation; unset HOSTFILE, or use LAUNCHER=pdsh"
elif [[ -n $HOSTFILE ]]; then
    [[ -z $RANKS ]] || fail "RANKS: with HOSTFILE the run's layout is the number of ranks, and a slot runs one; unset RANKS"
    options+=(--hostfile "$HOSTFILE")
else
    options+=(--local ${RANKS:+--slots "$RANKS"})
fi
[[ -z $MASTER_ADDR ]] || options+=(--master "$MASTER_ADDR")
[[ -z $INTERFACE ]] || options+=(--interface "$INTERFACE")
for file in ~/.deepspeed_env .deepspeed_env; do
    [[ ! -r $file ]] || options+=(--env-file "$file")
done
for name in $EXPORT; do
    [[ ! -v $name ]] || options+=(--export "$name")
done
exec "$PYTHON" -m megalite launch "$RUN" "${options[@]}" "$@"
