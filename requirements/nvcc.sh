#!/usr/bin/env bash
# Install NVIDIA's nvcc package (100 MB) into PYTHON's environment, and print one line if no nvcc on this machine can build the kernels.
# usage: nvcc.sh PYTHON [MORE PIP ARGUMENTS...]
set -euo pipefail
python=$1
shift
folder=$(cd "$(dirname "$0")" && pwd)
"$python" -m pip install --quiet --disable-pip-version-check -c "$folder/gpu.txt" "$@" -r "$folder/nvcc.txt" \
  || echo "NVIDIA's package of nvcc cannot be installed; looking for another nvcc" >&2
"$python" -P "$folder/../asyncmoe/build.py"  # -P, because folders beside it have the names of standard modules
