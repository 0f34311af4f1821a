"""How long training pauses for a checkpoint, compared with a plain copy of the same state.

A separate program (`python -m benchmarks.checkpoint FILE`), because it prepares Megatron for this machine.
"""

from __future__ import annotations

import ctypes
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from asyncmoe.errors import InvariantBroken
from benchmarks import provenance

SHAPE = {"layers": 4, "hidden": 384, "heads": 4, "experts": 16, "experts_per_token": 4, "expert_hidden": 512}
ROUNDS = 7
LIMIT_S = 900.0


def run() -> dict[str, Any]:
    """Alternate asynchronous saves, synchronous saves and plain copies of a model of `SHAPE` with Adam's state, in one single-threaded
    process.

    Returns:
        state_bytes: bytes copied and written. copy_seconds: libc's memcpy of the state, tensor by tensor, into preallocated memory.
        async_seconds, sync_seconds: median pauses of training. async_over_copy, sync_over_copy: medians of the per-turn ratios.
        first_seconds: of the first asynchronous save, which plans and allocates. written_seconds: from the copy to the complete
        checkpoint, while updates are made. update_seconds: of an update alone; update_while_written: how much longer an update takes
        while the thread writes, on a machine with a core for it.

    Raises:
        InvariantBroken: the measuring process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.json"
        command = [sys.executable, "-m", "benchmarks.checkpoint", str(file)]
        done = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InvariantBroken(f"bench checkpoint: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def measure(folder: Path) -> dict[str, Any]:
    """See `run`."""
    import torch

    from asyncmoe.config import parse
    from asyncmoe.config.model import MadeModel
    from asyncmoe.models import load_hf_config
    from asyncmoe.models.make import make_model
    from asyncmoe.platform.megatron.patch import module
    from asyncmoe.trainer.model import checkpoint, gpt, mesh, optimizer
    from asyncmoe.trainer.model.checkpoint_saver import Saver

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    path = folder / "model"
    make_model(path, MadeModel(**SHAPE), seed=0)
    values = {
        "run": {"dir": str(folder / "run"), "steps": 1},
        "model": {"path": str(path)},
        "task": {"kind": "arithmetic"},
        "trainer": {"async_save": True, "keep_checkpoints": 1, "optimizer": {"lr": 1e-3}},
    }
    config = parse(values)
    place = mesh.start(config.trainer)
    built = gpt.build(load_hf_config(path), config, place)
    adam = optimizer.build(config, built)
    gradients(built)
    optimizer.step(adam, lambda _: True)
    saver = Saver(config, built, adam)
    standing = Saver(config.model_copy(update={"trainer": config.trainer.model_copy(update={"async_save": False})}), built, adam)
    first = seconds(lambda: saver.save(1))
    assert saver._under_way is not None
    copied = sum(tensor.nbytes for _, _, (_, tensors) in saver._under_way.planned._buckets for _, tensor in tensors)
    saver.settle()
    dicts, mapping = module("dist_checkpointing.dict_utils"), module("dist_checkpointing.mapping")
    parts = dicts.nested_values(checkpoint.sharded_state(built, adam, loading=False))
    live = [part.data for part in parts if isinstance(part, (mapping.ShardedTensor, mapping.ShardedTensorFactory))]
    others = [torch.ones_like(tensor) for tensor in live]

    def plain() -> None:
        for there, here in zip(others, live, strict=True):
            ctypes.memmove(there.data_ptr(), here.data_ptr(), here.numel() * here.element_size())

    assert all(tensor.is_contiguous() for tensor in live)

    def update() -> None:
        optimizer.step(adam, lambda _: True)

    begun_at = provenance.here()
    times: dict[str, list[float]] = {"copy": [], "async": [], "written": [], "sync": [], "update": [], "beside": []}
    for number in range(ROUNDS):
        times["copy"].append(seconds(plain))
        times["update"] += [seconds(update) for _ in range(3)]
        times["async"].append(seconds(lambda: saver.save(2 + 2 * number)))  # noqa: B023  called at once
        begun, saver_done = time.perf_counter(), False
        while not saver_done:
            times["beside"].append(seconds(update))
            saver_done = any(step == 2 + 2 * number for step, _ in saver.saved())
        times["written"].append(time.perf_counter() - begun)
        times["sync"].append(seconds(lambda: standing.save(3 + 2 * number)))  # noqa: B023
    mesh.stop()
    slower = median(times.pop("beside")) / median(times["update"])
    return {
        **begun_at,
        "model": SHAPE,
        "dtype": str(built.dtype).removeprefix("torch."),
        "tensors": len(live),
        "state_bytes": sum(tensor.numel() * tensor.element_size() for tensor in live),
        "buffer_bytes": copied,
        "rounds": ROUNDS,
        "first_seconds": first,
        **{f"{name}_seconds": median(each) for name, each in times.items()},
        "update_while_written": slower,
        **{f"{name}_over_copy": median(a / b for a, b in zip(times[name], times["copy"], strict=True)) for name in ("async", "sync")},
    }


def gradients(built: Any) -> None:
    """Give each parameter a gradient, so that a step fills the optimizer's state."""
    for chunk in built.ddp:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.normal_()


def seconds(act: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        Path(sys.argv[1]).write_text(json.dumps(measure(Path(made)), indent=1))
