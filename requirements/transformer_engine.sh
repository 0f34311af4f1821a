#!/usr/bin/env bash
# Install Transformer Engine into PYTHON's environment, which has torch and nvcc. Its PyTorch extension is published as source only; it is
# built against the installed torch, and its wheel is kept in ASYNCMOE_WHEELS (~/.cache/asyncmoe/wheels) for environments with the same
# torch, Python and C library. Never fails: after a failed build it prints one line and removes all parts, and the trainer runs without
# Transformer Engine.
# usage: transformer_engine.sh PYTHON LOG [MORE PIP ARGUMENTS...]
set -uo pipefail
python=$1 log=$2
shift 2
folder=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$(dirname "$python")" && pwd)
parts=(transformer-engine transformer-engine-cu13 transformer-engine-torch)
version=$(sed -n 's/^transformer-engine==//p' "$folder/gpu.txt")
pip() { "$python" -m pip "$1" --disable-pip-version-check -c "$folder/gpu.txt" "${@:2}"; }

# A compiler process takes up to 4 GB for torch's headers.
memory=$(awk '/^MemAvailable:/ {print int($2 / 4194304)}' /proc/meminfo 2> /dev/null)
jobs=$(nproc)
[ "${memory:-1}" -lt "$jobs" ] && jobs=${memory:-1}
[ "$jobs" -lt 1 ] && jobs=1
export MAX_JOBS=${MAX_JOBS:-$jobs} PATH=$bin:$PATH
# Use the headers of CUDA, cuDNN and NCCL in torch's packages, and build here instead of letting setup.py download a binary.
export NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE
unset CUDA_HOME

key=$version-$("$python" "$folder/check_transformer_engine.py" key 2> /dev/null)
kept=${ASYNCMOE_WHEELS:-${XDG_CACHE_HOME:-~/.cache}/asyncmoe/wheels}/transformer-engine-$key
# A wheel is kept after it was imported. Until its copy is whole it has another name, so nodes that build at once do not disturb each other.
keep() { mkdir -p "$kept" && cp "$1" "$kept/.$HOSTNAME-$$" && mv "$kept/.$HOSTNAME-$$" "$kept/${1##*/}"; }

built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
wheel=$(find "$kept" -name '*.whl' 2> /dev/null | head -n 1)
[ -n "$wheel" ] || echo "Transformer Engine: building with $MAX_JOBS jobs, 5 to 20 minutes; its log is $log" >&2
{
  # pip's own cache does not tell wheels for different versions of torch apart.
  pip install "$@" -r "$folder/transformer-engine.txt" \
    && { [ -n "$wheel" ] || pip wheel --no-build-isolation --no-deps --no-cache-dir --wheel-dir "$built" transformer-engine-torch; } \
    && pip install --no-deps --force-reinstall "${wheel:-$(echo "$built"/*.whl)}" \
    && "$python" "$folder/check_transformer_engine.py" \
    && { [ -n "$wheel" ] || keep "$built"/*.whl || true; }
} > "$log" 2>&1 && exit 0
why=$(grep -E 'rror|annot|not found' "$log" | tail -n 1 | cut -c 1-200)
"$python" -m pip uninstall --quiet --yes "${parts[@]}" >> "$log" 2>&1
mend="Mend what $log says${wheel:+, or remove $wheel}, and run: make transformer-engine GPU=1"
echo "Transformer Engine: got none (${why:-see the log}), expected $key; the trainer uses Megatron's own layers on torch's kernels instead, which is slower. $mend" >&2
exit 0
