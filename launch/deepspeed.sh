#!/usr/bin/env bash
# Train with the deepspeed launcher, on this machine or on the nodes of a hostfile.
#
#   RUN=examples/quickstart/run.toml RANKS=8 launch/deepspeed.sh                 one machine
#   RUN=my/run.toml HOSTFILE=my/hostfile launch/deepspeed.sh --training.steps 100
#   RUN=my/run.toml HOSTFILE=my/hostfile LAUNCHER=openmpi launch/deepspeed.sh
#
# Arguments go to `megalite train`. Several nodes need pdsh or an MPI on this node, ssh by key from it to every node of
# the hostfile (itself included), and this folder and PYTHON at the same path on all nodes.
set -euo pipefail

RUN=${RUN:-examples/quickstart/run.toml}    # the run to train
PYTHON=${PYTHON:-python3}                   # Python with megalite installed
RANKS=${RANKS:-8}                           # one machine: tensor x pipeline x data ranks of the run
HOSTFILE=${HOSTFILE:-}                      # several nodes: their names and ranks, see hostfile.example
LAUNCHER=${LAUNCHER:-pdsh}                  # several nodes: pdsh, openmpi, mpich, impi; slurm inside an allocation
MASTER_ADDR=${MASTER_ADDR:-}                # several nodes: the first node's address; empty: deepspeed looks for one
MASTER_PORT=${MASTER_PORT:-29500}           # free port on the first node; each job on it needs its own
INTERFACE=${INTERFACE:-}                    # network between the nodes, as in eth0; empty: chosen by the route
EXPORT=${EXPORT:-OMP_NUM_THREADS HF_HOME HF_TOKEN WANDB_API_KEY}    # variables that travel, where they are set
# As root, common in containers, LAUNCHER=openmpi needs: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# --- Nothing below needs an edit. ---
fail() {
    echo "error: $1" >&2
    exit 2
}
options=(--master_port "$MASTER_PORT" --log_level error --no_local_rank)
program=(--module megalite)
if [[ -z $HOSTFILE ]]; then
    # /dev/null, or deepspeed would read /job/hostfile. The number of ranks is that of --num_gpus, also without GPUs.
    exec "$PYTHON" -m deepspeed.launcher.runner "${options[@]}" --hostfile /dev/null --num_gpus "$RANKS" \
        "${program[@]}" train "$RUN" "$@"
fi
# If the file is missing, deepspeed silently trains on this node alone.
[[ -r $HOSTFILE ]] || fail "HOSTFILE: $HOSTFILE cannot be read"
first=$(awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$HOSTFILE")
[[ -n $first ]] || fail "HOSTFILE: $HOSTFILE names no node; write lines such as 'node-a slots=8'"
[[ $LAUNCHER == pdsh ]] || MASTER_ADDR=${MASTER_ADDR:-$first}

if [[ -n $INTERFACE ]]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
names=()
for name in GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME $EXPORT; do
    [[ ! -v $name ]] || names+=("$name")
done
arguments=""
case $LAUNCHER in
    pdsh)
        # deepspeed passes on only PYTHON... and, with GPUs, NCCL... variables, and those of this file.
        export DS_ENV_FILE
        DS_ENV_FILE=$(mktemp "${TMPDIR:-/tmp}/deepspeed-env-XXXXXX")
        # Removed when the process that this shell becomes has ended.
        { tail --pid=$$ -f /dev/null && rm -f "$DS_ENV_FILE"; } >/dev/null 2>&1 &
        # Its parser fails at a blank line, and a comment makes the whole remote command one.
        cat ~/.deepspeed_env .deepspeed_env 2>/dev/null | grep -E '^[A-Za-z_][A-Za-z_0-9]*=' >"$DS_ENV_FILE" || true
        for name in "${names[@]}"; do
            [[ ! ${!name} =~ [\"\$\`\\] ]] || fail "$name: deepspeed cannot pass on a value with a quote, \$, \` or \\"
            printf '%s=%s\n' "$name" "${!name}" >>"$DS_ENV_FILE"
        done
        ;;
    openmpi)
        export MASTER_ADDR MASTER_PORT
        for name in MASTER_ADDR MASTER_PORT PATH "${names[@]}"; do arguments+=" -x $name"; done
        [[ -z $INTERFACE ]] || arguments+=" --mca btl_tcp_if_include $INTERFACE"
        ;;
    mpich | impi) ;;    # pass on all variables
    slurm)
        arguments="--kill-on-bad-exit=1"
        options+=(--no_ssh_check)
        ;;
    *) fail "LAUNCHER: $LAUNCHER is none of pdsh, openmpi, mpich, impi, slurm" ;;
esac
case $LAUNCHER in
    mpich | slurm) program=("$(dirname "${BASH_SOURCE[0]}")/deepspeed_rank.py") ;;    # they run a file, not a module
esac
options+=(--hostfile "$HOSTFILE" --launcher "$LAUNCHER" --force_multi)
[[ -z $MASTER_ADDR ]] || options+=(--master_addr "$MASTER_ADDR")
[[ -z $arguments ]] || options+=("--launcher_args=${arguments# }")
exec "$PYTHON" -m deepspeed.launcher.runner "${options[@]}" "${program[@]}" train "$RUN" "$@"
