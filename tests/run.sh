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
    bash tests/unit/convert/setup.sh
    bash tests/unit/evaluate/setup.sh & # beside what needs no lm_eval
    bash tests/launch/setup.sh || exit
    bash tests/browser/setup.sh
fi
set_up=$SECONDS
[ $# -eq 0 ] || { wait && exec "$python" -m pytest "${chosen[@]}" "$@"; }

# Bytecode is kept: hundreds of processes of the tests import megalite, and would each compile it.
unset PYTHONDONTWRITEBYTECODE

failed=()
times="set-up $set_up s"
for style in "ruff check --quiet ." "ruff format --quiet --check ."; do
    # shellcheck disable=SC2086
    "$python" -m $style || failed+=(ruff)
done
wait

# Three at a time over two cores, since launchers, servers and signals wait much. What takes longest begins first, so
# that no long group is left alone at the end.
groups=(
    "tests/parity"
    "tests/unit"
    "tests/end_to_end"
    "tests/launch"
    "tests/distributed"
    "tests/standin"
    "tests/cli tests/browser tests/museum tests/test_architecture.py tests/test_guides.py tests/test_museum.py tests/test_pages.py"
    "tests/kernels"
)
outputs=$(mktemp -d)
ended=0
end() { # what was still running shows what it printed
    kill $(jobs -p) 2>/dev/null && wait
    rm -f "$outputs"/*.partial "$outputs"/*.end "$outputs/times"
    tail -n +1 "$outputs"/* 2>/dev/null
    rm -rf "$outputs"
}
trap end EXIT
trap 'exit 143' TERM
run() { # in a subshell: its output, and then its status and seconds, in files named after the group
    local start=$SECONDS name=${1//[\/ ]/-} status=0
    shift
    "$python" -m "$@" >"$outputs/$name" 2>&1 &
    trap "kill $! && wait $!; exit 143" TERM
    wait $! || status=$?
    echo "$status $1 $((SECONDS - start))" >"$outputs/$name.partial" && mv "$outputs/$name.partial" "$outputs/$name.end"
}
show() { # what has ended since the last call
    local end name status tool seconds
    for end in "$outputs"/*.end; do
        [ -e "$end" ] || return
        read -r status tool seconds <"$end"
        name=${end%.end}
        printf '\n== %s, %d s\n' "$(basename "$name")" "$seconds"
        cat "$name"
        rm "$end" "$name"
        ended=$((ended + 1))
        [ "$status" -eq 0 ] || failed+=("$tool")
    done
}
start=$SECONDS
for group in "${groups[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge 3 ]; do wait -n; done
    show
    # shellcheck disable=SC2086
    run "$group" pytest -q --slowest-files 10 "${chosen[@]}" $group &
done
while [ "$(jobs -rp | wc -l)" -ge 3 ]; do wait -n; done
run mypy mypy &
while [ -n "$(jobs -rp)" ]; do
    wait -n
    show
done
show
[ $ended -eq $((${#groups[@]} + 1)) ] || failed+=("a part without a result")
times+=", tests $((SECONDS - start)) s"
times >"$outputs/times" # not in a pipeline: a subshell has times of its own
times+=", processors $(tr 'ms,' '  .' <"$outputs/times" | awk '{sum += $1 * 60 + $2 + $3 * 60 + $4} END {printf "%d", sum}') s"
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nfailed: %s (%s)\n' "${failed[*]}" "$times" >&2
    exit 1
fi
printf '\npassed (%s)\n' "$times"
