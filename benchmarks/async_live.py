"""The asynchrony benchmark's real engines and whole runs, and their records."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import yaml

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.engines import backend
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.engines.pool import Pool, PooledGeneration
from asyncmoe.engines.types import Sampling
from asyncmoe.errors import EngineError, WaitTimeout
from asyncmoe.process import Child
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks.arithmetic import Arithmetic
from asyncmoe.rollout.tasks.encode import Encoder
from asyncmoe.rollout.tasks.order import DrawnTask
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.telemetry.overlap import intersection, length
from asyncmoe.telemetry.run import RunRecords, load
from benchmarks.async_case import MOST_TOKENS, SCALES, WORKLOADS, PoolSizes
from benchmarks.cores import Cores
from benchmarks.drawn import Drawn
from benchmarks.running_engines import RunningEngine, below

_TIMEOUT_S = 900.0
_SATURATED_S = 25.0


@dataclass(frozen=True)
class Rates:
    """Rates of the engine, in tokens per second.

    Attributes:
        working: with all slots taken by the workload, each refilled as soon as it is free.
        decoding: with all slots taken by the longest responses, so that there are hardly any prompts to compute.
        few: with an eighth of the slots taken by the longest responses, as at the end of a batch.
        tokens: mean length of the workload's responses.
    """

    working: float
    decoding: float
    few: float
    tokens: float


def rates(config: Config, folder: Path, name: str, sizes: PoolSizes) -> Rates:
    """Measure the rates on a separate engine, which writes to a new `folder`."""
    with Cores.halves().as_engine():
        return asyncio.run(_rates(config, folder, name, sizes))


async def _rates(config: Config, folder: Path, name: str, sizes: PoolSizes) -> Rates:
    folder.mkdir()
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
    engine = backend.start("engine.0", config, 0)
    try:
        await engine.wait_ready()
        (running,) = below(psutil.Process())
        running.slow_down(sizes.step_s)
        drawn = Drawn(WORKLOADS[name], sizes.group_size, seed=1, tokens=SCALES[name])
        longest = Drawn(f"fixed:tokens={MOST_TOKENS}", sizes.group_size)
        working, tokens = await _rate(engine, config, drawn, sizes.slots)
        decoding, _ = await _rate(engine, config, longest, sizes.slots)
        few, _ = await _rate(engine, config, longest, sizes.slots // 8)
        return Rates(working, decoding, few, tokens)
    finally:
        await engine.stop()


class _Timed(Pool):
    """Counts responses, and adds up their time at an engine."""

    seconds = 0.0
    responses = 0

    async def _ask(self, *arguments: Any) -> PooledGeneration:
        begin = time.monotonic()
        answer = await super()._ask(*arguments)
        self.seconds += time.monotonic() - begin
        self.responses += 1
        return answer


async def _rate(engine: EngineProcess, config: Config, drawn: Drawn, slots: int) -> tuple[float, float]:
    """Return tokens per second with `slots` slots taken, over the responses that end within `_SATURATED_S` (at least the first), and the
    mean length of those responses.

    A slot's rate is their tokens divided by their seconds at the engine, so it does not matter which responses the window cuts off.
    """
    tokenizer = Tokenizer(config.model.path)
    pool = _Timed([engine], slots, _TIMEOUT_S, lambda *_: None)
    recording = models.recording(config, models.load_hf_config(config.model.path))
    stage = RolloutContext(pool, Sampling(1.0, MOST_TOKENS, (), recording=recording), tokenizer, Exact(), drawn, timeout_s=_TIMEOUT_S)
    task, places = DrawnTask(Arithmetic(("+",), 1), Encoder(tokenizer, chat=False), 0, "arithmetic"), iter(range(1 << 30))

    async def play() -> None:
        while True:
            group, member = divmod(next(places), config.rollout.group_size)
            await episode.run(stage, task.prompt(group), EpisodeId(group, member, 0))

    # Tool calls take no slot: more episodes than slots keep all slots taken.
    playing = [asyncio.create_task(play()) for _ in range(4 * slots)]
    try:
        await asyncio.sleep(_SATURATED_S / 3)
        pool.seconds, pool.responses, tokens = 0.0, 0, pool.generated_tokens
        await asyncio.sleep(_SATURATED_S)
        while not (pool.seconds or any(part.done() for part in playing)):
            await asyncio.sleep(0.1)
        if failed := [part for part in playing if part.done()]:
            failed[0].result()
        tokens = pool.generated_tokens - tokens
        return slots * tokens / pool.seconds, tokens / pool.responses
    finally:
        for part in playing:
            part.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def run(config: Config, sizes: PoolSizes) -> RunRecords:
    """Run `asyncmoe run` on `Cores.halves`, slowing engines down as soon as they accept requests."""
    cores = Cores.halves()
    path = config.run.dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with cores.as_engine():
        child = Child("asyncmoe run", [sys.executable, "-m", "asyncmoe", "run", str(path)], config.run.dir.with_suffix(".log"))
    try:
        asyncio.run(_when_ready(config, sizes.step_s, child, cores))
        if not child.wait(_TIMEOUT_S):
            raise WaitTimeout("asyncmoe run", f"the end of {config.run.dir.name}", _TIMEOUT_S)
    finally:
        child.end(60.0)
    if child.returncode:
        raise EngineError(f"{config.run.dir.name}: {child.why()}")
    return load(config.run.dir)


async def _when_ready(config: Config, seconds: float, child: Child, cores: Cores) -> None:
    """Pin the trainer to its cores once it exists, and slow the engines down once they respond."""
    placed, ready = 0, list[RunningEngine]()
    until = time.monotonic() + config.engines.start_timeout_s
    while len(ready) < config.engines.count:
        if child.returncode is not None:
            return
        placed = placed or cores.place_trainer(child.pid)
        if time.monotonic() > until:
            raise WaitTimeout("engine.0", "start", config.engines.start_timeout_s)
        await asyncio.sleep(0.1)
        ready = [engine for engine in below(psutil.Process(child.pid)) if await _answers(engine)]
    if not placed:
        raise EngineError(f"{config.run.dir.name}: an engine but no trainer process after {config.engines.start_timeout_s:.0f} s at most")
    for engine in ready:
        engine.slow_down(seconds)


async def _answers(engine: RunningEngine) -> bool:
    client = backend.connect("engine.0", engine.url, engine.key)
    try:
        return await client.ready()
    finally:
        await client.close()


def measured(run: RunRecords, sizes: PoolSizes) -> dict[str, Any]:
    """Summarise a run's steady state: the steps after the first `PoolSizes.skip`.

    Returns:
        step_s, train_s, wait_s, sync_s, pause_s: means per step. tokens: sampled and trained per step. sampled_per_s: by the engine.
        trainer_idle: share of time in which the trainer neither trained nor published. engine_idle: share in which the engine was idle.
        ages: trained sampled tokens by age in versions. oldest: the highest of these ages. tokens_lost: tokens discarded because a
        response started over. dropped: trajectories by reason.
    """
    steps = run.rl[sizes.skip :]
    begin, end = steps[0].begin, steps[-1].time
    wall = end - begin
    ages: Counter[int] = Counter()
    for step in steps:
        ages.update({int(age): count for age, count in (step.ages or {}).items()})
    window = [record for record in run.rollout if begin <= record.time <= end]
    seconds = window[-1].time - window[0].time
    busy = length(intersection(run.intervals("generate"), [(begin, end)]))
    last = run.rollout[-1]
    return {
        "wall": wall,
        "steps": len(steps),
        "step_s": wall / len(steps),
        "train_s": fmean(step.train_seconds or 0.0 for step in steps),
        "wait_s": fmean(step.wait_seconds or 0.0 for step in steps),
        "sync_s": fmean(step.sync_seconds or 0.0 for step in steps),
        "pause_s": fmean(step.pause_ms or 0.0 for step in steps) / 1e3,
        "tokens": sum(ages.values()) / len(steps),
        "sampled_per_s": (window[-1].generated_tokens - window[0].generated_tokens) / seconds,
        "trainer_idle": sum(step.wait_seconds or 0.0 for step in steps) / wall,
        "engine_idle": 1 - busy / wall,
        "ages": {str(age): ages[age] for age in sorted(ages)},
        "oldest": max(step.staleness_max or 0 for step in run.rl),
        "tokens_lost": last.lost_tokens,
        "dropped": last.dropped if isinstance(last.dropped, int) else dict(last.dropped),
    }
