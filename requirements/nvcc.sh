#!/usr/bin/env bash
# Install NVIDIA's package of nvcc (100 MB) into the environment of PYTHON, and say in one line when no nvcc here can build the kernels.
# usage: nvcc.sh PYTHON [FURTHER ARGUMENTS OF PIP...]
set -euo pipefail
python=$1
shift
folder=$(cd "$(dirname "$0")" && pwd)
"$python" -m pip install --quiet --disable-pip-version-check -c "$folder/gpu.txt" "$@" -r "$folder/nvcc.txt" \
  || echo "NVIDIA's package of nvcc cannot be installed; looking for another nvcc" >&2
"$python" "$folder/../asyncmoe/doctor/probes/toolchain.py"
