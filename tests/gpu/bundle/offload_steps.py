"""Twenty steps with the optimizer in host memory, and with Adam on the GPU: `python -m tests.gpu.bundle.offload_steps RESULT`.

Both start from the same weights and take the same gradients, drawn for each step; the weights must agree to 1e-5 of the largest. Memory of
the GPU is read before the optimizer is built and after the last step. Without a GPU both sides are Adam on the CPU, which tries everything
but the offload.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.bundle.summary import write_outcome

STEPS, RATE = 20, 1e-3
SHAPE = {"layers": 4, "hidden": 512, "heads": 8, "experts": 8, "experts_per_token": 2, "expert_hidden": 256}
CLOSE = 1e-5
"""Largest difference of a float32 weight over the largest weight."""


def main() -> None:
    result = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        kept, offloaded = (_child(Path(folder), share) for share in (0.0, 1.0))
    difference = float(np.abs(offloaded["weights"] - kept["weights"]).max() / np.abs(kept["weights"]).max())
    figures: dict[str, tuple[Any, str]] = {
        "device": (str(kept["device"]), ""),
        "difference": (difference, "of the largest weight"),
        "parameters": (int(kept["parameters"]), ""),
    }
    for name, one in (("kept", kept), ("offloaded", offloaded)):
        figures |= {f"{name}_before": (int(one["before"]), "bytes"), f"{name}_after": (int(one["after"]), "bytes")}
    write_outcome(result, figures)
    if not difference <= CLOSE:
        sys.exit(f"weights after {STEPS} steps: got a difference of {difference:.2e}, expected at most {CLOSE:.0e}")
    saved = (kept["after"] - kept["before"]) - (offloaded["after"] - offloaded["before"])
    if str(kept["device"]) != "cpu" and saved < 11 * kept["parameters"]:
        sys.exit(f"memory: got {saved} bytes less on the GPU, expected some 12 a parameter, of which there are {kept['parameters']}")


def _child(folder: Path, share: float) -> dict[str, np.ndarray]:
    """In a process of its own, because Megatron is prepared once in a process."""
    target = folder / f"{share:g}.npz"
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    code = f"from tests.gpu.bundle import offload_steps as m; m.steps({share!r}, {str(target)!r})"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    with np.load(target) as numbers:
        return dict(numbers)


def steps(share: float, target: str) -> None:
    """Make the model, take the steps with this share of the state offloaded, and write the float32 weights."""
    import torch

    from asyncmoe.config.model import MadeModel
    from asyncmoe.trainer.model import mesh, optimizer
    from tests import saving

    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer: dict[str, Any] = {"dtype": "bfloat16", "optimizer": {"lr": RATE, "distributed": True}}
        if cuda:
            trainer["memory"] = {"optimizer_offload": share}
        config = saving.small(Path(folder), MadeModel(**SHAPE), **trainer)
        built = saving.built(config)
    before = torch.cuda.memory_allocated() if cuda else 0
    adam = optimizer.build(config, built)
    parameters = sum(parameter.numel() for chunk in built.chunks for parameter in chunk.parameters())
    draws = torch.Generator(built.mesh.device).manual_seed(1)
    for _ in range(STEPS):
        for chunk in built.ddp:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draws, device=built.mesh.device))
        optimizer.step(adam, lambda _: True)
    after = torch.cuda.memory_allocated() if cuda else 0
    device = torch.cuda.get_device_name(0) if cuda else "cpu"
    weights = _masters(adam)
    np.savez(target, weights=weights, before=before, after=after, parameters=parameters, device=device)
    mesh.stop()


def _masters(adam: Any) -> np.ndarray:
    """float32[n], the weights that the optimizer updates, in the order of the model's parameters."""
    import torch

    found = []
    for one in getattr(adam, "chained_optimizers", [adam]):
        for parameter in one.model_param_group_index_map:
            found.append(one._get_main_param_and_optimizer_states(parameter)["param"].detach().float().reshape(-1).cpu())
    return torch.cat(found).numpy()


if __name__ == "__main__":
    main()
