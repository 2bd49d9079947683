#!/usr/bin/env bash
# Sets up .venv, trains examples/quickstart/run.toml and lets the model continue two lines of Python.
# In a copy made by `megalite examples` it uses the installed megalite.
# Arguments go to `megalite train`, for example --training.steps 50 --run.folder runs/short.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
megalite=megalite
if [ -f examples/setup.sh ]; then
    bash examples/setup.sh
    megalite=.venv/bin/megalite
fi
"$megalite" train examples/quickstart/run.toml "$@"

run_folder=runs/quickstart
previous=
for argument in "$@"; do
    [[ $previous != --run.folder ]] || run_folder=$argument
    previous=$argument
done
for prompt in "class Server" "    def __init__(self, "; do
    printf '\n-- at temperature 0.6, after "%s":\n' "$prompt"
    "$megalite" generate "$run_folder" --prompt "$prompt" --tokens 80 --temperature 0.6 --top-p 0.9
done
