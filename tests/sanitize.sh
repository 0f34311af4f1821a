#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer, each in a copy of the package, and runs the tests of
# the extension against it. usage: tests/sanitize.sh [address|undefined]...   (both when none is named)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
python=$(realpath -s "$python")
tests="test_reshard_copy.py test_reshard_program.py test_reshard_exchanger.py test_reshard_shm.py test_reshard_random.py test_reshard_errors.py"
for sanitizer in "${@:-address undefined}"; do
    for kind in $sanitizer; do
        folder=$(mktemp -d)
        trap 'rm -rf "$folder"' EXIT
        cp -r asyncmoe csrc tests setup.py pyproject.toml README.md LICENSE "$folder"
        rm -f "$folder"/asyncmoe/reshard/_C*.so
        library=$(gcc -print-file-name=$([ "$kind" = address ] && echo libasan.so || echo libubsan.so))
        # GCC 12 takes instrumented code of pybind11 for uninitialized, hence no warnings.
        flags="-fsanitize=$kind -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1 -w"
        (
            cd "$folder"
            ASYNCMOE_CUDA=0 ASYNCMOE_CXXFLAGS="$flags" "$python" setup.py --quiet build_ext --inplace
            export LD_PRELOAD="$library $(gcc -print-file-name=libstdc++.so)"
            # Python itself never frees everything, and multiprocessing ends children without running destructors.
            export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 PYTHONPATH="$folder"
            "$python" -c 'import asyncmoe.reshard._C as c, os; assert c.__file__.startswith(os.getcwd()), c.__file__'
            cd tests/unit
            "$python" -m pytest -c ../../pyproject.toml --rootdir ../.. $tests
        )
        rm -rf "$folder"
        echo "$kind sanitizer: clean"
    done
done
