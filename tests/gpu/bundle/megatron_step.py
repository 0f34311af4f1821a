"""One Megatron step on CUDA and the same on the CPU: `python -m tests.gpu.bundle.megatron_step local|te RESULT`.

Both sides make the same random model, send every token through the same recorded experts, and compare log-probabilities before and after
the step, loss and gradient norm. Without a GPU the first side is the CPU again, which tries everything but the numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.bundle.summary import write_outcome

TOKENS, TRAJECTORIES, RATE = 64, 4, 1e-3
SHAPE = {"layers": 3, "hidden": 128, "heads": 4, "experts": 8, "experts_per_token": 2, "expert_hidden": 64}
CLOSE = 1e-4
"""Float32 without TF32: largest difference over the largest magnitude on the CPU."""
CLOSE_BF16 = 0.05
"""bfloat16 against float32: mean difference of a log-probability, in nats."""


def main() -> None:
    spec, result = sys.argv[1], Path(sys.argv[2])
    import torch

    with tempfile.TemporaryDirectory() as folder:
        sides = [("cpu", "local", "float32"), ("cuda", spec, "float32")]
        if torch.cuda.is_available():
            sides.append(("cuda", spec, "bfloat16"))
        cpu, fp32, *bf16s = _children(Path(folder), sides)
    figures: dict[str, tuple[Any, str]] = {"device": (str(fp32["device"]), ""), "layers": (str(fp32["layers"]), "")}
    bf16 = bf16s[0] if bf16s else None
    worst = 0.0
    for name in ("before", "after", "loss", "grad_norm"):
        difference = float(np.abs(fp32[name] - cpu[name]).max() / np.abs(cpu[name]).max())
        figures[f"{name}_difference"] = (difference, "of the largest on the CPU")
        worst = max(worst, difference)
    figures |= {"loss_cpu": (float(cpu["loss"]), "nats"), "loss": (float(fp32["loss"]), "nats")}
    if bf16 is not None:
        figures["bf16_difference"] = (float(np.abs(bf16["after"] - cpu["after"]).mean()), "nats, mean")
        figures["loss_bf16"] = (float(bf16["loss"]), "nats")
    write_outcome(result, figures)
    if not worst <= CLOSE:
        sys.exit(f"float32 on the GPU: got a difference of {worst:.2e}, expected at most {CLOSE:.0e} of the CPU's numbers")
    if bf16 is not None and not figures["bf16_difference"][0] <= CLOSE_BF16:
        sys.exit(f"bfloat16: got a mean difference of {figures['bf16_difference'][0]:.2e} nats, expected at most {CLOSE_BF16}")


def _children(folder: Path, sides: Sequence[tuple[str, str, str]]) -> list[dict[str, np.ndarray]]:
    """Device, spec and dtype of each; all at once, each in a process of its own, as Megatron is prepared once in a process."""
    started = []
    for device, spec, dtype in sides:
        target = folder / f"{device}-{dtype}.npz"
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **hidden}
        code = f"from tests.gpu.bundle import megatron_step as m; m.step({spec!r}, {dtype!r}, {str(target)!r})"
        started.append((subprocess.Popen([sys.executable, "-c", code], env=environment), target))
    statuses = [process.wait() for process, _ in started]
    if any(statuses):
        sys.exit(f"steps on {', '.join('-'.join(side) for side in sides)}: got statuses {statuses}, expected 0; see the log")
    found = []
    for _, target in started:
        with np.load(target) as numbers:
            found.append(dict(numbers))
    return found


def step(spec: str, dtype: str, target: str) -> None:
    """Make the model, take a step on this process's device and write its numbers."""
    if spec == "local":
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # as if it were not installed
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    from asyncmoe.config.model import MadeModel
    from asyncmoe.trainer import objective, start
    from asyncmoe.trainer.data import batch
    from asyncmoe.trainer.data.schedule import BatchGrid
    from asyncmoe.trainer.losses import SupervisedLoss
    from asyncmoe.trainer.model import mesh, optimizer
    from asyncmoe.trainer.step import logprobs_only, train_step
    from benchmarks.trajectories import demonstrations
    from tests import saving

    with tempfile.TemporaryDirectory() as folder:
        config = saving.small(Path(folder), MadeModel(**SHAPE), dtype=dtype)
        built = saving.built(config)
    adam, replay = optimizer.build(config, built), start.replay(config, built)
    known = dict(enumerate(demonstrations(TRAJECTORIES, TOKENS, built.hf["vocab_size"], replay.routing)))
    weights = objective.token_weights([TOKENS - 1] * TRAJECTORIES, "token_mean")

    def microbatches() -> list[batch.MicroBatch]:
        nothing = np.zeros(TRAJECTORIES)
        grid, routing = BatchGrid(), replay.routing
        return [batch.pack(known, list(known), advantages=nothing, weights=weights, grid=grid, packed=True, routing=routing)]

    def logprobs() -> np.ndarray:
        by_index = logprobs_only(built, microbatches(), [TOKENS] * TRAJECTORIES, 1.0, replay)
        return np.stack([by_index[index] for index in range(TRAJECTORIES)])

    before = logprobs()
    metrics = train_step(built, adam, microbatches(), SupervisedLoss(), RATE, replay=replay)
    experts = sorted({type(module).__name__ for module in built.chunks[0].modules() if type(module).__name__.endswith("MLP")})
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    numbers = {"before": before, "after": logprobs(), "loss": metrics.loss, "grad_norm": metrics.grad_norm}
    np.savez(target, device=device, layers=", ".join(experts), **numbers)
    mesh.stop()


if __name__ == "__main__":
    main()
