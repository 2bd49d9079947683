#!/usr/bin/env bash
# Sets up .venv, checks style and types, and runs the tests.
#   tests/run.sh                        the core: the cheap unit tests, and of every table and topic a part that proves it
#   tests/run.sh --all                  what every change must pass: all tests but those marked slow or gpu
#   tests/run.sh tests/unit -k layout   pytest alone, with these arguments
#   tests/run.sh --all tests/parity     pytest alone, with those marked extended
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The tests read the machine code of the CUDA kernels, also where torch has no CUDA.
MEGALITE_CUDA=${MEGALITE_CUDA:-try} bash examples/setup.sh || exit
python=.venv/bin/python
chosen=()
if [ "${1-}" = --all ]; then
    chosen=(-m "not gpu and not slow")
    shift
    bash tests/unit/evaluate/setup.sh & # beside what needs no lm_eval
    bash tests/launch/setup.sh || exit
fi
set_up=$SECONDS
[ $# -eq 0 ] || { wait && exec "$python" -m pytest "${chosen[@]}" "$@"; }

# Two parts of about the same time. The launchers, which wait much, come beside the tests of one process.
beside=(tests/cli tests/kernels tests/unit tests/test_architecture.py tests/parity)
others=(tests/launch tests/distributed tests/end_to_end tests/standin)
failed=()
times="set-up $set_up s"
check() {
    printf '\n== %s\n' "$*"
    local start=$SECONDS
    "$python" -m "$@" || failed+=("$1")
    times+=", $1 $((SECONDS - start)) s"
}
check ruff check --quiet .
check ruff format --quiet --check .
check mypy
wait
tests=(pytest -q --slowest-files 10 "${chosen[@]}")
output=$(mktemp)
trap 'rm -f "$output"' EXIT
"$python" -m "${tests[@]}" "${beside[@]}" >"$output" 2>&1 &
check "${tests[@]}" "${others[@]}"
start=$SECONDS
wait $! || failed+=(pytest)
times+=", waited $((SECONDS - start)) s"
printf '\n== %s\n' "${tests[*]} ${beside[*]}"
cat "$output"
times >"$output" # not in a pipeline: a subshell has times of its own
times+=", processors $(tr 'ms,' '  .' <"$output" | awk '{sum += $1 * 60 + $2 + $3 * 60 + $4} END {printf "%d", sum}') s"
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nfailed: %s (%s)\n' "${failed[*]}" "$times" >&2
    exit 1
fi
printf '\npassed (%s)\n' "$times"
