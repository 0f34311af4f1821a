#!/usr/bin/env bash
# Install torch VERSION into the environment of PYTHON: the CPU build wherever pip can get one, unless GPU=1.
set -euo pipefail
python=$1 version=$2
install() { "$python" -m pip install --quiet --disable-pip-version-check "$1"; }
if [ "${GPU:-0}" != 1 ] && install "torch==$version+cpu" 2>/dev/null; then
  exit 0
fi
install "torch==$version"
