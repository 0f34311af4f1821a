#!/usr/bin/env bash
# Build the wheel of transformer-engine-torch for the call `transformer-engine`, on a machine with a network and g++, without a GPU. It is
# published as source only, and fits one torch: TORCH, by default the oldest that the calls run with. It takes 5 GB of disk, 15 minutes of
# one core, and 2 GB of memory for each of MAX_JOBS. A second run goes on where the first was ended, or does nothing.
# usage: build_engine.sh PYTHON OUT      PYTHON: of version 3.12. Then: make.py OTHER --built OUT
set -euo pipefail
python=$1 out=$2
requirements=$(cd "$(dirname "$0")/../../../requirements" && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
compgen -G "$out/transformer_engine_torch-*.whl" > /dev/null && exit 0
"$python" -m venv "$out/venv"
export PATH=$out/venv/bin:$PATH MAX_JOBS=${MAX_JOBS:-1}
pip() { "$out/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
version() { sed -n "s/^$1==//p" "$requirements/gpu.txt"; }
pinned() { for name in "$@"; do echo "$name==$(version "$name")"; done; }
# Headers: torch brings those of CUDA's libraries, these the compiler's.
pip install -q "torch==${TORCH:-2.11.0}" setuptools wheel ninja pybind11 packaging numpy
pip install -q --no-deps -r <(pinned nvidia-cuda-crt nvidia-cuda-cccl transformer-engine transformer-engine-cu13)
# No expert parallelism over NCCL, which takes a newer NCCL than torch's.
export NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0
unset CUDA_HOME
source=$out/transformer_engine_torch-$(version transformer-engine-torch)
if [ ! -d "$source" ]; then
  pip download -q --no-deps --no-binary=:all: --no-build-isolation --dest "$out" -r <(pinned transformer-engine-torch)
  tar -xzf "$source.tar.gz" -C "$out"
fi
cd "$source"
"$out/venv/bin/python" setup.py -q bdist_wheel --dist-dir "$out"
