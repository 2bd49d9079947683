#!/usr/bin/env bash
# Sets up .venv and runs the whole job of run.toml beside it; arguments are passed on (--training.steps 50).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash examples/setup.sh
exec .venv/bin/megalite train examples/quickstart/run.toml "$@"
