"""Steps in bfloat16 with `run.deterministic` give the same bits in two processes: `python -m tests.gpu.bundle.deterministic_steps local|te
RESULT`.

Each builds the slice of `slice.py` with the same weights and tokens, records experts, takes optimizer steps that replay them, and digests
gradients, weights and optimizer state. A third process, without `run.deterministic`, takes the steps twice from the same weights and the
same batch, and counts the weights that differ. The processes start together, and then take turns on the card; the first is not timed, as
the others may still be starting. Without a card the slice is tiny.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.gpu.bundle.slice import LAYERS
from tests.gpu.bundle.summary import write_outcome

RATE = 1e-4
_WARM, _ROUNDS = 2, 5
KINDS = ("gradient", "weights", "optimizer")


def main() -> None:
    spec, result = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        one, other, off = _children(Path(folder), spec, (True, True, False))
    figures: dict[str, tuple[Any, str]] = {
        "steps": (_WARM + _ROUNDS, "steps"),
        "parameters": (int(off["parameters"]), ""),
        "step": (float(other["step"]), "s, with run.deterministic"),
        "price": (float(other["step"] / off["step"]) - 1, "of a step without it"),
        "digest": (float(other["digest"]), "s, of gradients, weights and optimizer state"),
        "digest_share": (float(other["digest"] / other["step"]), "of a step"),
        "differ": (int(off["differ"]), "weights, without run.deterministic"),
        "differ_most": (float(off["most"]), "largest difference of a weight"),
    }
    wrong = [f"{kind} of {name}" for kind in KINDS for name in one["tensors"][one[kind] != other[kind]]]
    figures["other_digests"] = (len(wrong), f"of {len(KINDS) * len(one['tensors'])}, with run.deterministic")
    write_outcome(result, figures)
    if wrong:
        sys.exit(f"run.deterministic: got {len(wrong)} other digests in the second process, first the {wrong[0]}, expected the same bits")


def _children(folder: Path, spec: str, kinds: Sequence[bool]) -> list[dict[str, np.ndarray]]:
    """What processes with and without `run.deterministic` write. Each waits for a line before it uses the card."""
    targets = [folder / f"{number}.npz" for number in range(len(kinds))]
    code = "from tests.gpu.bundle import deterministic_steps as m; m.taken"
    commands = [[sys.executable, "-c", f"{code}{spec, on, str(target)}"] for on, target in zip(kinds, targets, strict=True)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the card computes
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for command in commands]
    for process in started:
        process.communicate(b"\n")
    if any(process.returncode for process in started):
        sys.exit(f"processes with run.deterministic {kinds}: got statuses {[process.returncode for process in started]}, expected 0")
    found = []
    for target in targets:
        with np.load(target) as numbers:
            found.append(dict(numbers))
    return found


def taken(spec: str, on: bool, target: str) -> None:
    """Take the steps, and write what `main` compares."""
    if spec == "local":
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # as if it were not installed
    from asyncmoe.trainer.model import environment
    from tests.configs import minimal

    config = minimal(run={"dir": "unused", "steps": 1, "deterministic": on})
    environment.prepare(config)
    from asyncmoe.trainer.model import mesh  # prepares Megatron for what is installed
    from asyncmoe.trainer.model.digests import StateDigests
    from benchmarks import slice_steps as model

    input()
    place = mesh.start(config.trainer)
    steps = model.Steps(place, LAYERS, {"dtype": "bfloat16"})
    seconds = [steps.take(True, RATE)[0] for _ in range(_WARM + _ROUNDS)]
    numbers: dict[str, Any] = {"step": median(seconds[_WARM:])}
    if on:
        digests = StateDigests(steps.built, steps.adam)
        for _ in range(2):  # the first call warms up
            begin = time.perf_counter()
            numbers |= {kind: getattr(digests, kind)() for kind in KINDS}
            numbers["digest"] = time.perf_counter() - begin
        numbers["tensors"] = np.array(digests.tensors)
    else:
        before, batches = {name: weight.clone() for name, weight in steps.built.weights().items()}, steps.batches
        steps.free()
        del steps  # and with it the optimizer's state
        steps = model.Steps(place, LAYERS, {"dtype": "bfloat16"})
        steps.batches = batches
        for _ in range(_WARM + _ROUNDS):
            steps.take(True, RATE)
        pairs = [(weight, before[name]) for name, weight in steps.built.weights().items()]
        numbers["parameters"] = sum(weight.numel() for weight, _ in pairs)
        numbers["differ"] = sum(int((now != then).sum()) for now, then in pairs)
        numbers["most"] = max(float((now - then).abs().max()) for now, then in pairs)
    np.savez(target, **numbers)
    mesh.stop()


if __name__ == "__main__":
    main()
