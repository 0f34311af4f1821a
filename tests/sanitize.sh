#!/usr/bin/env bash
# Builds the extension with sanitizers in a copy of the package, and runs the tests that touch it against that.
# usage: tests/sanitize.sh [address,undefined | thread]      (address,undefined when none is named)
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
kind=${1:-address,undefined}
tests="reshard_copy reshard_program reshard_cast reshard_float8 reshard_checksum reshard_exchanger reshard_shm reshard_random reshard_errors"
tests+=" reshard_cuda_emulated reshard_delta reshard_delta_cuda_emulated"
tests+=" record_routes record_masks record_checksum record_answer rollout_sampled turns"
# Threads of one process that use the extension at the same time: those that pack and unpack, exchangers, the log's writers. TSan sees no
# memory that processes share.
threaded="reshard_copy reshard_program reshard_float8 reshard_checksum reshard_exchanger reshard_shm record_routes record_masks"
threaded+=" record_checksum turns"
case $kind in
    address,undefined) libraries="libubsan.so libasan.so" ;;
    thread) libraries="libtsan.so" tests=$threaded ;;
    *) echo "got $kind, expected address,undefined or thread" >&2; exit 2 ;;
esac
preload=$(gcc -print-file-name=libstdc++.so)
for library in $libraries; do  # the last one is preloaded first, as AddressSanitizer wants to be
    path=$(gcc -print-file-name="$library")
    [ -f "$path" ] || { echo "the compiler has no $library" >&2; exit 77; }
    preload="$path $preload"
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -r asyncmoe benchmarks csrc tests setup.py pyproject.toml README.md LICENSE "$folder"
rm -f "$folder"/asyncmoe/reshard/_C*.so "$folder"/asyncmoe/trajectory/_C*.so
cd "$folder"
# GCC 12 takes instrumented code of pybind11 for uninitialized, hence no warnings.
flags="-fsanitize=$kind -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1 -w"
ASYNCMOE_CUDA=0 ASYNCMOE_CXXFLAGS="$flags" "$python" setup.py --quiet build_ext --inplace
export LD_PRELOAD="$preload"
# Python itself never frees everything, and multiprocessing ends children without running destructors.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS="exitcode=66 report_signal_unsafe=0"
export OMP_NUM_THREADS=1 PYTHONPATH="$folder"
"$python" -c 'import asyncmoe.reshard._C as c, os; assert c.__file__.startswith(os.getcwd()), c.__file__'
files=()
for name in $tests; do files+=(tests/*/"test_$name.py"); done
"$python" -m pytest -q -p no:cacheprovider "${files[@]}"
echo "$kind: clean"
