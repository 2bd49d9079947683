#!/usr/bin/env bash
# Installs megatron-core (8 MB, seconds) without what it requires, which only tests marked extended or slow need, into
# .venv: they run its model, optimizers and checkpoints on the CPU. Does nothing if it is there.
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
python=.venv/bin/python
"$python" -m pip show --quiet megatron-core 2>/dev/null && exit
echo "megatron-core: installing it for the tests of megalite convert import"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps megatron-core==0.16.1 ||
    echo "megatron-core: pip could not install it; its tests are skipped"
