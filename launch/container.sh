#!/usr/bin/env bash
# Installs megalite into an image of Debian or Ubuntu: the distribution's Python and C++ compiler, then examples/setup.sh.
#
#   bash launch/container.sh            launch/Dockerfile and launch/megalite.def call it; as root, in a copy of this folder
#
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL: package indices of yours, such as that of torch's builds for the CPU.
# MEGALITE_CPU: the oldest processor that the image has to run on; MEGALITE_CUDA, MEGALITE_ARCHS: see setup.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export DEBIAN_FRONTEND=noninteractive
apt-get update
# libpython3-dev and g++: DeepSpeed and torch.compile compile too. libopenmpi-dev: mpi4py, for MPI's launchers.
apt-get install --yes --no-install-recommends \
    ca-certificates g++ libopenmpi-dev openmpi-bin python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

export PIP_NO_CACHE_DIR=1
MEGALITE_CPU=${MEGALITE_CPU:-x86-64-v3} bash examples/setup.sh
.venv/bin/megalite --version
