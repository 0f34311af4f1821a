"""Instructions the copy kernel issues for 16 bytes, counted in its machine code: `python tests/sass.py [--arch 90] [--json]`.

Compiles csrc/copy.cu with nvcc (on PATH, or under CUDA_HOME) for one architecture, and disassembles with nvdisasm (on PATH, beside
nvcc, or in ASYNCMOE_CUDA_TOOLS; `pip install nvidia-cuda-nvdisasm` has it). Needs no GPU. `--sources DIR` counts another tree's.

The count is static: the fewest instructions on any way round a loop that loads some units of 16 bytes and stores as many, divided by
their number. Predicated instructions count. So it is exact for straight code, and a lower bound where a unit's way has inner loops.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MULTIPROCESSORS, SCHEDULERS, CLOCK_HZ = 132, 4, 1.755e9
"""Of an H100 SXM and an H200; a scheduler issues one instruction for 32 threads in a cycle (CUDA Programming Guide, compute capability
9.0)."""
REGISTERS, WARP = 65536, 32
KERNELS = {"copy within a rank": "WireE0", "unpack": "WireE1", "pack": "WireE2"}
_MOST_UNITS = 8
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")


@dataclass(frozen=True)
class Instruction:
    """`guard`: its predicate, empty where it always executes; `targets`: labels it may branch to."""

    guard: str
    name: str
    targets: tuple[str, ...]

    @property
    def ends_block(self) -> bool:
        return bool(self.targets) or self.name.split(".")[0] in ("BRA", "BRX", "EXIT", "RET")

    @property
    def goes_on(self) -> bool:
        """Whether what comes after it may be executed next."""
        return not self.ends_block or bool(self.guard) or self.name not in ("BRA", "BRX", "EXIT", "RET")


@dataclass(frozen=True)
class Count:
    """Of one kernel. `registers` of a thread, `spilled` bytes, and `blocks` of `threads` that a multiprocessor holds by its registers."""

    kernel: str
    instructions_per_unit: float
    units: int
    registers: int
    spilled: int
    threads: int
    blocks: int
    issue_bound_tb_s: float


def tool(name: str) -> Path | None:
    """A program of the CUDA toolkit."""
    places = [os.environ.get("ASYNCMOE_CUDA_TOOLS", ""), os.environ.get("PATH", "")]
    if compiler := shutil.which("nvcc"):
        places.append(str(Path(compiler).resolve().parent))
    places += [str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")]
    found = shutil.which(name, path=os.pathsep.join(places))
    return Path(found) if found else None


def obstacle() -> str | None:
    """What is missing here for counting, or None."""
    missing = [name for name in ("nvcc", "nvdisasm") if tool(name) is None]
    return f"no {' and no '.join(missing)} on PATH or in ASYNCMOE_CUDA_TOOLS" if missing else None


def compile_cubin(source: Path, arch: str, target: Path) -> str:
    """Compile one .cu file; returns what ptxas says of registers and spills."""
    command = [
        str(tool("nvcc")),
        "-cubin",
        f"-arch=sm_{arch}",
        source.name,
        "-o",
        str(target),
        "-std=c++17",
        "-O3",
        "-DASYNCMOE_CUDA",
        "-I.",
    ]
    done = subprocess.run(
        [*command, "-Xptxas", "-v", "-Xcompiler=-Wall,-Wextra,-Werror"],
        cwd=source.parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"nvcc cannot compile {source}: {done.stderr[-2000:]}")
    return done.stderr


def usage(report: str) -> dict[str, tuple[int, int]]:
    """(registers, spilled bytes) by mangled name, from ptxas' report."""
    found = {}
    for part in report.split("Compiling entry function '")[1:]:
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert spilled is not None
        assert registers is not None
        found[part.split("'")[0]] = int(registers[1]), int(spilled[1]) + int(spilled[2])
    return found


def disassembled(cubin: Path) -> dict[str, list[Instruction | str]]:
    """Instructions and, as strings, labels in front of them, by mangled name of the function."""
    command = [str(tool("nvdisasm")), "-c", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    functions: dict[str, list[Instruction | str]] = {}
    here: list[Instruction | str] = []
    for line in listing.splitlines():
        if section := re.match(r"\s+\.section\s+\.text\.([^,]+),", line):
            here = functions.setdefault(section[1], [])
        elif label := re.match(r"(\.L\w+):", line):
            here.append(label[1])
        elif found := _INSTRUCTION.match(line):
            words = found[1].split()
            guard = words.pop(0) if words[0].startswith("@") else ""
            branch = words[0].startswith(("BRA", "BRX"))
            here.append(Instruction(guard, words[0], tuple(re.findall(r"\.L\w+", found[1])) if branch else ()))
    return functions


@dataclass(frozen=True)
class Block:
    """Instructions without a branch among them: their number, the loads and stores of 16 bytes, and the blocks that may follow."""

    size: int
    loads: int
    stores: int
    following: tuple[int, ...]


def blocks_of(code: list[Instruction | str]) -> list[Block]:
    """In the order of the code; a block names those that follow by their numbers."""
    parts: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for item in code:
        if parts[-1] and (isinstance(item, str) or parts[-1][-1].ends_block):
            parts.append([])
        if isinstance(item, str):
            labels[item] = len(parts) - 1
        else:
            parts[-1].append(item)
    made = []
    for number, part in enumerate(parts):
        following = {labels[target] for target in part[-1].targets} if part else set()
        if (not part or part[-1].goes_on) and number + 1 < len(parts):
            following.add(number + 1)
        loads = sum(i.name.startswith("LDG.E.128") for i in part)
        made.append(Block(len(part), loads, sum(i.name.startswith("STG.E.128") for i in part), tuple(sorted(following))))
    return made


def shortest_loop(blocks: list[Block], units: int) -> int | None:
    """Fewest instructions round a loop that loads and stores at least so many units; None where there is none."""
    best: int | None = None
    for start in [number for number, block in enumerate(blocks) if block.stores]:
        queue, seen = [(0, start, 0, 0)], set()
        while queue:
            cost, at, loads, stores = heapq.heappop(queue)
            if at == start and cost and loads >= units and stores >= units:
                best = cost if best is None else min(best, cost)
                break
            if (at, loads, stores) in seen or (best is not None and cost >= best):
                continue
            seen.add((at, loads, stores))
            block = blocks[at]
            reached = min(units, loads + block.loads), min(units, stores + block.stores)
            for following in block.following:
                heapq.heappush(queue, (cost + block.size, following, *reached))
    return best


def cheapest(blocks: list[Block]) -> tuple[float, int]:
    """Instructions for a unit, and the units of the loop they are of."""
    found = [(length / units, units) for units in range(1, _MOST_UNITS + 1) if (length := shortest_loop(blocks, units)) is not None]
    if not found:
        raise SystemExit("no loop loads and stores 16 bytes at a time")
    return min(found)


def count(sources: Path, arch: str = "90", threads: int = 256) -> list[Count]:
    """Count the copy kernel's variants."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "copy.cubin"
        used = usage(compile_cubin(sources / "copy.cu", arch, cubin))
        functions = disassembled(cubin)
    made = []
    for kernel, mark in KERNELS.items():
        (name,) = [name for name in functions if "copy_kernel" in name and mark in name]
        per_unit, units = cheapest(blocks_of(functions[name]))
        registers, spilled = used[name]
        held = REGISTERS // (-(-registers // 8) * 8 * threads)
        bound = MULTIPROCESSORS * SCHEDULERS * CLOCK_HZ * WARP / per_unit * 16 / 1e12
        made.append(Count(kernel, round(per_unit, 1), units, registers, spilled, threads, held, round(bound, 2)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="90")
    parser.add_argument("--sources", type=Path, default=ROOT / "csrc")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if missing := obstacle():
        sys.exit(missing)
    counts = count(given.sources.resolve(), given.arch)
    if given.json:
        print(json.dumps([asdict(one) for one in counts]))
        return
    columns = f"{'instructions/16 B':>18}{'registers':>11}{'spilled':>9}{'blocks/SM':>11}"
    heading = f"sm_{given.arch}"
    print(f"{heading:<22}{columns}{'bound by issue, TB/s (estimate)':>33}")
    for one in counts:
        shown = f"{one.kernel:<22}{one.instructions_per_unit:>18}{one.registers:>11}{one.spilled:>9}{one.blocks:>11}"
        print(f"{shown}{one.issue_bound_tb_s:>33}")


if __name__ == "__main__":
    main()
