#!/usr/bin/env bash
# Creates .venv in the repository's root with the versions in constraints.txt; does nothing if it is up to date.
# PYTHON: the interpreter to create it with (3.11 or newer; default: python3).
# MEGALITE_CUDA: 1: compile the CUDA kernels also for a torch without CUDA; others: see setup.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
stamp=$venv/set-up-done

say() { echo "set-up: $*"; }
# Includes the folder and the Python version: a virtual environment breaks if it is moved or its Python is removed.
state() {
    "$venv/bin/python" -V 2>/dev/null && pwd && sha256sum setup.py pyproject.toml constraints.txt &&
        find megalite/csrc -type f -not -name "*.pyc" -exec sha256sum {} + | sort && ls megalite/ops/libmegalite.json
}
# If MEGALITE_CUDA is not set, any earlier choice is kept.
is_done() {
    [ -f "$stamp" ] && [ "$(state)" = "$(head -n -1 "$stamp")" ] &&
        { [ -z "${MEGALITE_CUDA-}" ] || [ "MEGALITE_CUDA=$MEGALITE_CUDA" = "$(tail -n 1 "$stamp")" ]; }
}

is_done && exit
exec 9<constraints.txt
if ! flock --nonblock 9; then
    say "another set-up is running in this folder; waiting for it"
    flock 9
    is_done && exit
fi

if [ -f "$stamp" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "bringing $venv up to date"
else # no environment, or one whose set-up was interrupted
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        found=$("$python" -V 2>/dev/null || echo "no such command")
        say "error: megalite needs Python 3.11 or newer; '$python' is: $found." \
            "Name another interpreter: PYTHON=python3.12 bash examples/setup.sh" >&2
        exit 2
    fi
    say "installing into $venv, once (minutes)"
    if ! "$python" -m venv --clear "$venv"; then
        say "error: '$python -m venv' failed; on Debian and Ubuntu it needs the package python3-venv" >&2
        exit 2
    fi
fi
rm -f "$stamp"
quiet=()
[ -t 1 ] || quiet=(--quiet)
install() {
    "$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check --constraint constraints.txt "$@"
}
say "1/3 torch: for the CPU 0.2 GB to download and 0.8 GB on disk, for CUDA several GB"
install setuptools
install torch
say "2/3 the compiled operators, with the C++ compiler and, for a torch with CUDA, nvcc (after $SECONDS s)"
"$venv/bin/python" setup.py --quiet build_ext --inplace
say "3/3 DeepSpeed, transformers and the other packages (after $SECONDS s)"
# DeepSpeed is built from source against the installed torch, hence no build isolation.
install --no-build-isolation --editable '.[test]'
{ state && echo "MEGALITE_CUDA=${MEGALITE_CUDA:-auto}"; } >"$stamp"
say "done in $SECONDS s"
