#!/usr/bin/env bash
# On a machine with Python 3.12, CUDA 13 and torch, without a network:  ./run.sh RESULTS
# RESULTS gets summary.json and the logs, from the first part on. PYTHON names another Python than python3. Further arguments are run.py's.
# What is unpacked, installed and built stays in TMPDIR, where the next call on this machine finds it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${1:?expected a folder for the results: ./run.sh RESULTS}"
python=${PYTHON:-python3}
commit=$(< "$here/commit")
work=${TMPDIR:-/tmp}/asyncmoe-$commit
mkdir -p "$work/installed"
[ -d "$work/asyncmoe" ] || { mkdir -p "$work/unpacked" && tar -xzf "$here/asyncmoe.tar.gz" -C "$work/unpacked" && mv "$work/unpacked/asyncmoe" "$work"; }
missing=()
for wheel in "$here"/wheels/*.whl; do
  [ -e "$work/installed/${wheel##*/}" ] || missing+=("$wheel")
done
if [ ${#missing[@]} -gt 0 ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade --target "$work/site" "${missing[@]}"
  for wheel in "${missing[@]}"; do touch "$work/installed/${wheel##*/}"; done
fi
"$python" "$work/asyncmoe/tests/gpu/bundle/run.py" --call "$(< "$here/call")" --commit "$commit" --work "$work" "$@"
