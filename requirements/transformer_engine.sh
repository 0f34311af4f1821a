#!/usr/bin/env bash
# Install Transformer Engine into PYTHON's environment, which has torch and nvcc. Its PyTorch extension is published as source only, and is
# built against the installed torch. Never fails: after a failed build it prints one line and removes all parts, and the trainer runs
# without Transformer Engine.
# usage: transformer_engine.sh PYTHON LOG [MORE PIP ARGUMENTS...]
set -uo pipefail
python=$1 log=$2
shift 2
folder=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$(dirname "$python")" && pwd)
parts=(transformer-engine transformer-engine-cu13 transformer-engine-torch)
pip() { "$python" -m pip install --disable-pip-version-check -c "$folder/gpu.txt" "$@"; }

# A compiler process takes up to 4 GB for torch's headers.
memory=$(awk '/^MemAvailable:/ {print int($2 / 4194304)}' /proc/meminfo 2> /dev/null)
jobs=$(nproc)
[ "${memory:-1}" -lt "$jobs" ] && jobs=${memory:-1}
[ "$jobs" -lt 1 ] && jobs=1
export MAX_JOBS=${MAX_JOBS:-$jobs} PATH=$bin:$PATH
# Use the headers of CUDA, cuDNN and NCCL in torch's packages, and build here instead of letting setup.py download a binary.
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
