#!/usr/bin/env bash
# On a machine with Python 3.12, CUDA 13 and torch, without a network:  ./run.sh RESULTS
# RESULTS gets summary.json and logs.tar.gz, from the first part on. PYTHON names another Python than python3. Further arguments are run.py's.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${1:?expected a folder for the results: ./run.sh RESULTS}"
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xzf "$here/asyncmoe.tar.gz" -C "$work"
"$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --target "$work/site" "$here"/wheels/*.whl
"$python" "$work/asyncmoe/tests/gpu/bundle/run.py" --commit "$(cat "$here/commit")" --work "$work" "$@"
