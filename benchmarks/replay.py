"""The cost of replaying recorded experts in a trainer's step, in one process.

A separate program (`python -m benchmarks.replay FILE`), because it prepares Megatron for this machine.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken

TOKENS, TRAJECTORIES, ROUNDS = 256, 8, 15
SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "experts": 32, "experts_per_token": 4, "expert_hidden": 128}
LIMIT_S = 600.0
_OTHER = {"cpu": 0.01, "cuda": 0.1}
"""Allowed share of a layer's tokens with other experts than in the recording pass. Two passes on an H200 in bfloat16 differed
for 2.5 %, presumably near ties that rounding decides; unrelated routes would differ for most."""


def run() -> dict[str, Any]:
    """Alternate steps with and without replay on a model of `SHAPE`; both send every token through the same experts.

    Returns:
        step_seconds: median without replay. share: the overhead of replay, median over rounds of (with / without) - 1: packing the batch's
        routes into micro-batches, replaying them, and counting where the live router differs.

    Raises:
        InvariantBroken: the measuring process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "replay.json"
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.replay", str(file)], timeout=LIMIT_S, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise InvariantBroken(f"bench replay: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def measure(folder: Path) -> dict[str, Any]:
    """See `run`."""
    import torch

    from asyncmoe.config import parse
    from asyncmoe.config.model import MadeModel
    from asyncmoe.models import load_hf_config
    from asyncmoe.models.make import make_model
    from asyncmoe.trainer import loop, objective
    from asyncmoe.trainer.data import batch
    from asyncmoe.trainer.data.schedule import BatchGrid
    from asyncmoe.trainer.losses import SupervisedLoss
    from asyncmoe.trainer.model import gpt, mesh, optimizer
    from asyncmoe.trainer.step import logprobs_only, train_step
    from asyncmoe.trajectory import encode_routes
    from benchmarks.trajectories import demonstrations

    logging.disable(logging.WARNING)
    path = folder / "model"
    make_model(path, MadeModel(**SHAPE), seed=0)
    values = {"run": {"dir": str(folder), "steps": 1}, "model": {"path": str(path)}, "task": {"kind": "arithmetic"}}
    config = parse(values)
    place = mesh.start(config.trainer)
    built = gpt.build(load_hf_config(path), config, place)
    gpt.load_hf(built, path)
    adam = optimizer.build(config, built)
    replay = loop.replay(config, built)
    assert replay is not None
    weights = objective.token_weights([TOKENS - 1] * TRAJECTORIES, "token_mean")
    known = dict(enumerate(demonstrations(TRAJECTORIES, TOKENS, built.hf["vocab_size"])))

    def microbatches(kept: bool) -> list[batch.MicroBatch]:
        nothing = np.zeros(TRAJECTORIES)
        routing = replay.routing if kept else None
        return [batch.pack(known, list(known), advantages=nothing, weights=weights, grid=BatchGrid(), packed=True, routing=routing)]

    chosen: list[np.ndarray] = []

    def remember(_module: object, _inputs: object, out: Any) -> None:
        chosen.append(torch.nonzero(out[1])[:, 1].reshape(out[1].shape[0], -1).cpu().numpy())

    routers = (module for module in built.chunks[0].modules() if type(module).__name__ == "TopKRouter")
    hooks = [router.register_forward_hook(remember) for router in routers]
    logprobs_only(built, microbatches(False), [TOKENS] * TRAJECTORIES, 1.0)
    for hook in hooks:
        hook.remove()
    routes = np.stack(chosen, axis=1).astype(np.int32).reshape(TRAJECTORIES, TOKENS, len(chosen), -1)[:, :-1]
    known = {i: replace(t, routes=encode_routes(np.ascontiguousarray(routes[i]), replay.routing, t.key)) for i, t in known.items()}

    def step(kept: bool) -> float:
        begin = time.perf_counter()
        metrics = train_step(built, adam, microbatches(kept), SupervisedLoss(), 0.0, replay=replay)
        seconds = time.perf_counter() - begin
        if kept and max(metrics.routing_mismatch.values()) > _OTHER[built.mesh.device.type]:
            raise InvariantBroken(f"bench replay: the experts replayed are not the router's own: {metrics.routing_mismatch}")
        return seconds

    pairs = [(step(False), step(True)) if round % 2 else (step(True), step(False))[::-1] for round in range(ROUNDS + 2)][2:]
    mesh.stop()
    return {
        "model": SHAPE,
        "tokens": TOKENS * TRAJECTORIES,
        "step_seconds": round(median(plain for plain, _ in pairs), 4),
        "share": round(median(kept / plain for plain, kept in pairs) - 1, 4),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(measure(Path(scratch))))
