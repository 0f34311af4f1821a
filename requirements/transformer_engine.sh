#!/usr/bin/env bash
# Install Transformer Engine into the environment of PYTHON, which has torch and nvcc. Its part for torch exists as source only, and is
# built against that torch. Never fails: where it cannot be had, one line says so, nothing of it stays, and the trainer runs without.
# usage: transformer_engine.sh PYTHON LOG [FURTHER ARGUMENTS OF PIP...]
set -uo pipefail
python=$1 log=$2
shift 2
folder=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$(dirname "$python")" && pwd)
parts=(transformer-engine transformer-engine-cu13 transformer-engine-torch)
pip() { "$python" -m pip install --disable-pip-version-check -c "$folder/gpu.txt" "$@"; }

# A compiler of torch's headers takes up to 4 GB.
memory=$(awk '/^MemAvailable:/ {print int($2 / 4194304)}' /proc/meminfo 2> /dev/null)
jobs=$(nproc)
[ "${memory:-1}" -lt "$jobs" ] && jobs=${memory:-1}
[ "$jobs" -lt 1 ] && jobs=1
export MAX_JOBS=${MAX_JOBS:-$jobs} PATH=$bin:$PATH
# Headers of CUDA, cuDNN and NCCL out of torch's packages; built here, not fetched from elsewhere by its setup.py.
export NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE
unset CUDA_HOME

echo "Transformer Engine: building with $MAX_JOBS jobs, 5 to 20 minutes; its log is $log" >&2
{
  pip "$@" -r "$folder/transformer-engine.txt" \
    && pip --no-build-isolation --no-deps transformer-engine-torch \
    && "$python" "$folder/check_transformer_engine.py"
} > "$log" 2>&1 && exit 0
version=$(sed -n 's/^transformer-engine==//p' "$folder/gpu.txt")
why=$(grep -E 'rror|annot|not found' "$log" | tail -n 1 | cut -c 1-200)
"$python" -m pip uninstall --quiet --yes "${parts[@]}" >> "$log" 2>&1
echo "Transformer Engine: got none (${why:-see the log}), expected $version; the trainer uses Megatron's own layers on torch's kernels instead, which is slower. Mend what $log says and run: make transformer-engine GPU=1" >&2
exit 0
