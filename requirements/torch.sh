#!/usr/bin/env bash
# Install the torch version of cpu.txt or gpu.txt into PYTHON's environment. cpu: the CPU build if pip finds one. gpu: fail without a CUDA
# build.
# usage: torch.sh PYTHON cpu|gpu [MORE PIP ARGUMENTS...]
set -euo pipefail
python=$1 kind=$2
shift 2
folder=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^torch==//p' "$folder/$kind.txt")
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
# Print the version that pip would choose for a requirement, with its local part; empty if there is none.
offered() {
  pip --dry-run --no-deps --ignore-installed --report - "$1" 2> /dev/null \
    | "$python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2> /dev/null || true
}

if [ "$kind" = cpu ]; then
  pip "$@" "torch==$version+cpu" 2> /dev/null || pip "$@" "torch==$version"
  exit
fi
# `==` prefers local versions, so a second index with CPU builds would win; `===` excludes them.
wanted="torch===$version"
if [ -z "$(offered "$wanted")" ]; then
  wanted="torch==$version"
  found=$(offered "$wanted")
  if [[ $found == *+cpu* ]]; then
    "$python" -c 'import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])["offered"](sys.argv[2]))' "$folder/check_torch.py" "$found"
  fi
fi
pip -c "$folder/gpu.txt" "$@" "$wanted"
"$python" "$folder/check_torch.py"
