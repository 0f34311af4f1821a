"""The parts of a run, in order: what each starts and how long it may take. Only the standard library is imported here."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_S = 658.0
"""Of a whole run, from its start to the last result: under eleven minutes."""
_HERE = "tests.gpu.bundle"


@dataclass(frozen=True)
class Part:
    """A process `python -m MODULE ARGUMENTS... RESULT`, where RESULT is a file it may write with `summary.write_outcome`; pytest gets none.

    Attributes:
        limit_s: its own time. A part may also use what those before it left.
        needs: names of parts that must have ended "ok".
        gpu: skipped on a machine without one.
    """

    name: str
    limit_s: float
    module: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("build",)
    gpu: bool = True


def _tests(name: str, limit_s: float, *arguments: str) -> Part:
    return Part(name, limit_s, "pytest", ("-ra", "--durations=5", *arguments), gpu=False)


PARTS = (
    Part("facts", 20, f"{_HERE}.facts", needs=(), gpu=False),
    Part("build", 80, f"{_HERE}.build", needs=(), gpu=False),
    _tests("kernels", 77, "tests/gpu", "-k", "not sanitizer and not overlap and not deltas"),
    Part("bench", 30, f"{_HERE}.bench"),
    Part("megatron-local", 50, f"{_HERE}.megatron_step", ("local",), gpu=False),
    Part("megatron-te", 20, f"{_HERE}.megatron_step", ("te",), gpu=False),
    Part("offload", 20, f"{_HERE}.offload_steps", gpu=False),
    Part("replay", 45, f"{_HERE}.replay_cost", gpu=False),
    _tests("ipc", 35, "tests/gpu/test_reshard_gpu.py", "-k", "ipc or damaged"),
    _tests("nccl", 20, "tests/gpu/test_reshard_gpu.py", "-k", "nccl"),
    Part("graph", 20, f"{_HERE}.graph_commit"),
    Part("experts", 35, f"{_HERE}.triton_experts", gpu=False),
    Part("tiny-run", 85, f"{_HERE}.tiny_run", gpu=False),
    Part("checksums", 35, f"{_HERE}.checksums"),
    _tests("overlap", 25, "tests/gpu", "-k", "overlap"),
    _tests("deltas", 25, "tests/gpu/test_deltas.py"),
    _tests("sanitizer", 25, "tests/gpu/test_reshard_gpu.py", "-k", "sanitizer"),
)
"""The cheap and the telling come first. The build, without which there is nothing, has time for two
cores; a larger machine leaves most of it to the others."""
