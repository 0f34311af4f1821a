"""Our arm: the demo in processes of its own, then its engine alone, asked by a trivial client for the same answers."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from asyncmoe import config as configuration
from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.errors import InvariantBroken
from asyncmoe.rollout import tasks
from asyncmoe.rollout.engines.sglang.generation import request_body
from asyncmoe.rollout.engines.types import Sampling
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rpc.environment import STAND_BY
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, METRICS
from benchmarks.live_run import LiveRun
from benchmarks.running_engines import RunningEngine
from benchmarks.small_scale.case import SmallCase, Told, figures

ROLES = ("controller", "trainer", "launcher", "stand_by", "engine")
"""Of processes. "launcher": the supervisor, the keeper of engines, torchrun. "stand_by": processes that load their programs once and wait,
in case another is lost; what that takes belongs to no step."""
_PARTS = (
    ("sglang", "engine"),
    ("torchrun", "launcher"),
    ("torch.distributed", "launcher"),
    ("asyncmoe.trainer", "trainer"),
    (" rollout ", "controller"),
)
_LIMIT_S = 1500.0
_QUIET_S, _QUIET = 1.0, 0.1
"""The engine is idle if it takes less than this share of a core so long."""


def role(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the role of a process of a run, from its command and the environment it was started with."""
    found = next((role for part, role in _PARTS if part in " ".join(words)), "launcher")
    return "stand_by" if STAND_BY in environment and found != "engine" else found


class Accounts:
    """CPU seconds of a run's processes by role; what one has used still counts when it has ended."""

    def __init__(self) -> None:
        self._each: dict[tuple[int, float], tuple[str, float]] = {}

    def look(self, processes: Sequence[psutil.Process]) -> dict[str, float]:
        """Return the CPU seconds so far."""
        for process in processes:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                spent, key = process.cpu_times(), (process.pid, process.create_time())
                known = self._each.get(key)
                name = known[0] if known is not None and known[0] in ("trainer", "engine") else role(process.cmdline(), process.environ())
                self._each[key] = name, spent.user + spent.system
        return {one: sum(seconds for name, seconds in self._each.values() if name == one) for one in ROLES}


def measure(case: SmallCase, folder: Path, model: Path, ranks: int, *, raw: bool) -> dict[str, Any]:
    """Run the demo with answers of the case's length; see `run.run`.

    Args:
        raw: ask the engine alone too, when the run has taken its steps: "raw", and with nothing recorded "bare".

    Raises:
        InvariantBroken, WaitTimeout: the run ended, or is too slow.
    """
    folder.mkdir()
    run = LiveRun("peers", folder, case.settings(model, ranks))
    try:
        told = _steps(run, case)
        config = configuration.of_run(run.dir)
        found = figures(told, config.rollout.batch)
        if raw:
            with _stopped(run):
                (engine,) = run.engines()
                found |= {name: asyncio.run(_alone(engine, config, case.raw, bare=name == "bare")) for name in ("raw", "bare")}
        return found
    finally:
        run.end()


def _steps(run: LiveRun, case: SmallCase) -> list[Told]:
    accounts, told = Accounts(), list[Told]()
    begin = 0.0
    until = time.monotonic() + _LIMIT_S
    while len(told) < case.steps and time.monotonic() < until:
        run.check()
        records = [one for one in run.records(METRICS) if one.get("phase") == "rl"]
        if len(records) > len(told):
            cpu = accounts.look(run.processes())
            begin = begin or min(one["begin"] for one in run.records(CONTROLLER_SPANS) if one["what"] == "generate")
            for one in records[len(told) : case.steps]:
                told.append(Told(one["time"] - begin, cpu, one["reward_mean"], one["response_tokens_mean"]))
        time.sleep(0.02)
    if len(told) < case.steps:
        raise InvariantBroken(f"bench peers: {len(told)} steps in {_LIMIT_S:g} s, expected {case.steps}")
    return told


@contextmanager
def _stopped(run: LiveRun) -> Iterator[None]:
    """Within the context no rank trains, so that the queue fills up and the engine becomes idle."""
    ranks = [one for one in run.processes() if role(one.cmdline(), one.environ()) == "trainer"]
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGCONT)


async def _alone(engine: RunningEngine, config: Config, samples: int, *, bare: bool) -> dict[str, float]:
    """Ask an idle engine for answers, as many at once as the run does; each group of prompts is asked `group_size` times.

    Args:
        bare: record neither log-probabilities nor routes.
    """
    tokenizer, rollout = Tokenizer(config.model.path), config.rollout
    asked = tasks.load(config, tokenizer).training
    recording = models.recording(config, models.hf_config_of(config))
    sampling = Sampling(rollout.temperature, rollout.max_new_tokens, (tokenizer.eos,), recording=recording)
    bodies = []
    for number in range(samples):
        body = request_body(asked.prompt(10**6 + number // rollout.group_size).tokens, sampling, "raw", 0, None)
        bodies.append(body | {"return_logprob": False, "return_routed_experts": False} if bare else body)
    processes = [engine.process, *engine.process.children(recursive=True)]
    await _idle(processes)
    at_once, before, begin = asyncio.Semaphore(rollout.max_concurrent), _spent(processes), time.monotonic()
    tokens = 0
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {engine.key}"}, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(body: dict[str, Any]) -> None:
            nonlocal tokens
            async with at_once, session.post(f"{engine.url}/generate", json=body) as reply:
                reply.raise_for_status()
                tokens += (await reply.json())["meta_info"]["completion_tokens"]

        await asyncio.gather(*map(ask, bodies))
    seconds, cpu = time.monotonic() - begin, _spent(processes) - before
    return {
        "cpu_ms": round(1e3 * cpu / samples, 3),
        "samples_per_s": round(samples / seconds, 1),
        "tokens": round(tokens / samples, 2),
    }


async def _idle(processes: Sequence[psutil.Process]) -> None:
    until = time.monotonic() + 60 * _QUIET_S
    while time.monotonic() < until:
        before = _spent(processes)
        await asyncio.sleep(_QUIET_S)
        if _spent(processes) - before < _QUIET * _QUIET_S:
            return
    raise InvariantBroken("bench peers: the engine is not idle, although no rank trains")


def _spent(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)
