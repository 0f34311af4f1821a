"""The cost of a weight update for a real, generating engine: its pause, and its slowdown during staging."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.engines import adapters, backend
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import EngineError, WaitTimeout
from asyncmoe.launch.torchrun import trainer_command
from asyncmoe.models.make import make_model
from asyncmoe.rpc import keys
from asyncmoe.rpc.messages import Reply, Request, WeightsCommit, WeightsStage
from asyncmoe.rpc.server import Server
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator
from asyncmoe.weights.coordinator.driver import UpdateDriver
from benchmarks.provenance import here

SIZES = {
    "small": MadeModel(hidden=256, layers=4, heads=8, head_dim=32, experts=8, expert_hidden=384),
    "ten times larger": MadeModel(hidden=512, layers=6, heads=8, head_dim=64, experts=16, expert_hidden=640),
}
METHODS: dict[str, dict[str, Any]] = {
    "reshard": {"method": "reshard"},
    "broadcast": {"method": "broadcast"},
}
STREAMS = 4
_PROMPT = (30, 40, 50, 60, 70)
_TOKENS = 512
_REST_S = 0.4
"""Rest between updates, in which the engine is undisturbed."""
_TIMEOUT_S = 300.0

Window = tuple[float, float]


@dataclass
class Seen:
    """Events with times, in seconds of `time.monotonic()`."""

    tokens: list[tuple[float, int]] = field(default_factory=list)
    """Times and numbers of received tokens."""
    staging: list[Window] = field(default_factory=list)
    calm: list[Window] = field(default_factory=list)
    """From the end of an update to the beginning of the next."""


def run(updates: int = 30, trainer: Mapping[str, int] | None = None, engine: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Measure all methods on both sizes; every update is published while an engine generates `STREAMS` responses at once.

    Args:
        trainer: `ranks`, `tp`, `pp`, `ep`; engine: `tp`, `ep`, `count`.

    Returns:
        {"date", "machine", "load", "cases"}; a case has "model" (its "bytes" in float32), "method" and the result of `measure`.

    Raises:
        EngineError: an engine or a trainer rank died.
        WaitTimeout: they did not finish.
    """
    trainer = trainer or {"ranks": 2, "tp": 1, "pp": 1, "ep": 2}
    measured_at = here()
    cases = []
    for size, made in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder, "model"), made, seed=0)
            for name, sync in METHODS.items():
                values = {
                    "run": {"dir": str(Path(folder, name.replace(" ", "-"))), "steps": 1},
                    "model": {"path": str(Path(folder, "model"))},
                    "task": {"kind": "arithmetic"},
                    "trainer": {**trainer, "dtype": "float32"},
                    "engines": {"dtype": "float32", "max_running": 64, "max_total_tokens": 16384, **(engine or {})},
                    "sync": sync,
                }
                config = configuration.parse(values)
                nbytes = sum(file.stat().st_size for file in config.model.path.glob("*.safetensors"))
                cases.append({"model": size, "bytes": nbytes, "method": name, **asyncio.run(measure(config, updates))})
    return {
        **measured_at,
        "trainer": dict(trainer),
        "engine": dict(engine or {"tp": 1}),
        "streams": STREAMS,
        "cases": cases,
    }


async def measure(config: Config, updates: int) -> dict[str, Any]:
    """Start the processes of `config`, and publish while the first engine generates.

    Returns:
        "updates", medians of "pause_ms" and "sync_seconds", their maxima, "staging_seconds" (median), and "tokens_per_s" {"calm",
        "staging", "share"}: tokens received in those periods over their lengths, if there was any staging.
    """
    config.run.dir.mkdir(parents=True)
    key = secrets.token_urlsafe(32)
    engines = [backend.start(f"engine.{index}", config, index, key=key) for index in range(config.engines.count)]
    seen = Seen()
    try:
        await asyncio.gather(*(engine.wait_ready() for engine in engines))
        costs = await _publish(config, engines, key, seen, updates)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))
    pauses, seconds = [cost["pause_ms"] for cost in costs], [cost["seconds"] for cost in costs]
    found: dict[str, Any] = {
        "updates": len(costs),
        "pause_ms": median(pauses),
        "pause_ms_max": max(pauses),
        "sync_seconds": median(seconds),
        "sync_seconds_max": max(seconds),
    }
    if seen.staging:
        found["staging_seconds"] = median(end - begin for begin, end in seen.staging)
        calm, staging = rate(seen.tokens, seen.calm), rate(seen.tokens, seen.staging)
        found["tokens_per_s"] = {"calm": calm, "staging": staging, "share": staging / calm}
    return found


async def _publish(config: Config, engines: Sequence[EngineProcess], key: str, seen: Seen, updates: int) -> list[dict[str, float]]:
    """Let a trainer publish while the first engine generates; the first update, which includes the rendezvous, is not counted."""

    async def nothing(_: int) -> None:
        pass

    pool = Pool(engines, 64, 60.0, lambda *_: None, adapter=adapters.asked(config))
    coordinator = WeightUpdateCoordinator(UpdateDriver(pool, config.sync.timeout_s, lambda *_: None), nothing)
    coordinator.engines_started()
    staged, ended = 0.0, 0.0

    async def answer(request: Request) -> Reply:
        nonlocal staged, ended
        if isinstance(request, WeightsStage):
            staged = time.monotonic()
            if ended:
                seen.calm.append((ended, staged))
        if isinstance(request, WeightsCommit) and ended and config.sync.method == "reshard":
            seen.staging.append((staged, time.monotonic()))
        reply = await coordinator.handle(request)  # type: ignore[arg-type]  # only weight requests are sent
        if isinstance(request, WeightsCommit):
            ended = time.monotonic()
        return reply

    (config.run.dir / "config.json").write_text(config.model_dump_json())
    result = config.run.dir / "costs.json"
    async with Server(answer) as server:
        rendezvous = await server.start()
        keys.write(config.run.dir, rendezvous)
        background = [asyncio.create_task(server.serve())]
        background += [asyncio.create_task(_generate(engines[0].url, key, adapters.asked(config), seen)) for _ in range(STREAMS)]
        try:
            await _train(config, result, updates)
        finally:
            for task in background:
                task.cancel()
            keys.remove(config.run.dir, rendezvous)
    costs: list[dict[str, float]] = json.loads(result.read_text())
    return costs[1:]


async def _train(config: Config, result: Path, updates: int) -> None:
    command = trainer_command(config, config.run.dir / "config.json", "benchmarks.sync_sender", str(result), str(updates), str(_REST_S))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (config.run.dir / "trainer.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    try:
        status = await asyncio.wait_for(process.wait(), _TIMEOUT_S)
    except TimeoutError:
        raise WaitTimeout("the trainer's ranks", f"publish {updates} versions", _TIMEOUT_S) from None
    finally:
        if process.returncode is None:
            process.kill()
    if status != 0:
        print((config.run.dir / "trainer.log").read_text()[-3000:], file=sys.stderr)
        raise EngineError(f"the trainer of the measurement ended with status {status}; the end of its log is above")


async def _generate(url: str, key: str, adapter: str | None, seen: Seen) -> None:
    """Stream one response after the other until cancelled."""
    sampling = {"temperature": 1.0, "max_new_tokens": _TOKENS, "ignore_eos": True}
    body = {"input_ids": list(_PROMPT), "sampling_params": sampling, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None, sock_read=60.0)) as session:
        while True:
            counted = 0
            async with session.post(f"{url}/generate", json={**body, "lora_path": adapter}) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = json.loads(line[len(b"data: ") :])["meta_info"]["completion_tokens"]
                        seen.tokens.append((time.monotonic(), now - counted))
                        counted = now


def rate(tokens: Sequence[tuple[float, int]], windows: Sequence[Window]) -> float:
    """Return tokens per second over ordered, non-overlapping windows [begin, end)."""
    total, index = 0, 0
    ordered = sorted(tokens)
    for begin, end in windows:
        while index < len(ordered) and ordered[index][0] < begin:
            index += 1
        while index < len(ordered) and ordered[index][0] < end:
            total += ordered[index][1]
            index += 1
    return total / sum(end - begin for begin, end in windows)
