#!/usr/bin/env bash
# Sets up .venv, checks style and types, and runs all tests but those marked gpu or slow.
# With arguments: runs pytest with them, and nothing else (tests/run.sh tests/unit -k layout; tests/run.sh -m gpu).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash examples/setup.sh || exit
python=.venv/bin/python
[ $# -eq 0 ] || exec "$python" -m pytest "$@"

failed=()
check() {
    printf '\n== %s\n' "$*"
    "$python" -m "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check mypy
check pytest -q
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nfailed:%s\n' "$(printf ' [%s]' "${failed[@]}")" >&2
    exit 1
fi
