"""csrc/threads.h: what a task throws reaches the caller, whichever thread ran it, and does not end the process."""

from __future__ import annotations

import subprocess
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
PROGRAM = """
#include <cstdio>
#include <stdexcept>
#include <string>
#include "threads.h"
int main() {
    std::atomic<int> ran{0};
    asyncmoe::run_on_threads(4, 1000, [&](int64_t) { ++ran; });
    for (const int64_t bad : {0, 1, 500, 999}) {
        try {
            asyncmoe::run_on_threads(4, 1000, [&](int64_t i) {
                if (i == bad) throw std::runtime_error(std::to_string(i));
            });
        } catch (const std::runtime_error& error) {
            std::printf("%s ", error.what());
        }
    }
    std::printf("%d", ran.load());
}
"""


def test_the_first_exception_of_a_task_is_thrown_to_the_caller(tmp_path: Path) -> None:
    source, made = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(PROGRAM)
    subprocess.run(["g++", "-std=c++17", "-pthread", "-I", str(CSRC), "-o", str(made), str(source)], check=True, timeout=120)
    done = subprocess.run([made], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 1 500 999 1000"
