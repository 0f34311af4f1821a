"""The five calls and their parts, in order: what each part starts and how long it may take. Only the standard library is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LIMIT_S = 750.0
"""Of all calls together."""
_HERE = "tests.gpu.bundle"


@dataclass(frozen=True)
class Part:
    """A process `python -m MODULE ARGUMENTS... RESULT`, where RESULT is a file it may write with `summary.write_outcome`; pytest gets none.

    Attributes:
        limit_s: its own time. A part may also use what those before it left.
        needs: names of parts that must have ended "ok".
        gpu: skipped on a machine without one.
        asked: run only if --only names it, and not counted in the limits.
        again: run although it ended "ok" before: what it finds, or leaves behind, is of this machine.
    """

    name: str
    limit_s: float
    module: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("build",)
    gpu: bool = True
    asked: bool = False
    again: bool = False


def _tests(name: str, limit_s: float, *arguments: str, asked: bool = False) -> Part:
    return Part(name, limit_s, "pytest", ("-ra", "--durations=5", *arguments), gpu=False, asked=asked)


_FACTS = Part("facts", 12, f"{_HERE}.facts", needs=(), gpu=False, again=True)
_BEGIN = (_FACTS, Part("build", 50, f"{_HERE}.build", needs=(), gpu=False, again=True))
_BEGIN_ON_HOST = (_FACTS, Part("build", 25, f"{_HERE}.build", ("host",), needs=(), gpu=False, again=True))
"""Where no kernels of asyncmoe are needed, which saves half of the time. Limits are for a machine that has built nothing yet."""

CALLS: Mapping[str, tuple[Part, ...]] = {
    "two-processes": (
        *_BEGIN,
        Part("nccl", 40, f"{_HERE}.two_processes", gpu=False),
        _tests("ipc", 25, "tests/gpu/test_reshard_gpu.py", "-k", "ipc or damaged"),
    ),
    "updates": (
        *_BEGIN,
        Part("graph", 12, f"{_HERE}.graph_commit"),
        _tests("deltas", 20, "tests/gpu/test_deltas.py"),
        Part("offload", 20, f"{_HERE}.offload_steps", gpu=False),
        Part("update", 40, f"{_HERE}.whole_update", gpu=False),
        Part("bench", 40, f"{_HERE}.bench"),
        _tests("copies", 80, "tests/gpu/test_reshard_gpu.py", "-k", "not sanitizer", asked=True),
        _tests("overlap", 25, "tests/gpu/test_overlap_gpu.py", asked=True),
        _tests("sanitizer", 25, "tests/gpu/test_reshard_gpu.py", "-k", "sanitizer", asked=True),
    ),
    "slice": (
        *_BEGIN_ON_HOST,
        Part("slice", 53, f"{_HERE}.slice", ("local",), gpu=False),
        Part("head", 12, f"{_HERE}.head", gpu=False),
        Part("deterministic", 60, f"{_HERE}.deterministic_steps", ("local",), gpu=False),
        Part("megatron-local", 50, f"{_HERE}.megatron_step", ("local",), gpu=False, asked=True),
    ),
    "transformer-engine": (
        *_BEGIN_ON_HOST,
        Part("engine-loads", 10, f"{_HERE}.engine_loads"),
        _tests("kernels", 20, "tests/gpu/test_kernels.py"),
        Part("slice-te", 30, f"{_HERE}.slice", ("te",), needs=("build", "engine-loads")),
        Part("megatron-te", 20, f"{_HERE}.megatron_step", ("te",), needs=("build", "engine-loads")),
        Part("deterministic-te", 60, f"{_HERE}.deterministic_steps", ("te",), needs=("build", "engine-loads"), asked=True),
    ),
    "memory-saver": (
        *_BEGIN,
        Part("colocated", 88, f"{_HERE}.colocated", gpu=False),
        Part("checksums", 35, f"{_HERE}.checksums", asked=True),
    ),
}
"""Name -> parts. The cheap and the telling come first. What has passed on an H200, and other parts exercise too, is only asked for."""
