#!/usr/bin/env bash
# Installs lm_eval (0.5 GB, half a minute), which only tests marked extended need, into .venv. Does nothing if it is there.
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
python=.venv/bin/python
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("lm_eval") is None)' && exit
echo "lm_eval: installing it for the tests of megalite evaluate --tasks"
"$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt lm_eval ||
    echo "lm_eval: pip could not install it; its tests are skipped"
