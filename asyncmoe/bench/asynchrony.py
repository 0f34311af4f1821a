"""What asynchrony gains on this machine: the three modes of `run.mode` with real engines and a real trainer, next to the closed laws.

The lengths of responses are drawn, not left to the model, and an engine's step takes as long as SGLang's own /slow_down makes it, so that
what the processor cores of this machine do besides does not decide the outcome. Everything else is `asyncmoe run` as it is.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import numpy as np
import yaml

from asyncmoe import config as configuration
from asyncmoe import models
from asyncmoe.bench.drawn import Drawn
from asyncmoe.config import Config
from asyncmoe.config.generation import MadeModel
from asyncmoe.errors import EngineError, WaitTimeout
from asyncmoe.models.make import make_model
from asyncmoe.rollout import episode
from asyncmoe.rollout.engine import Engine
from asyncmoe.rollout.engine_client import EngineClient, Sampling
from asyncmoe.rollout.episode import Stage
from asyncmoe.rollout.pool import Pool
from asyncmoe.rollout.scoring import Exact
from asyncmoe.rollout.tasks.arithmetic import Arithmetic
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rollout.turns import Place
from asyncmoe.simulate import laws
from asyncmoe.simulate.plant import MODES, Mode, Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.workload import Quantile, parse
from asyncmoe.telemetry.overlap import intersection, length
from asyncmoe.telemetry.run import Run, load

WORKLOADS = {
    "lognormal": "lognormal:median=48,sigma=1,cap=384",
    "math": "math:cap=32768",
    "search": "search:median_s=0.16,sigma_s=1.5,cap_s=3.8",
}
SCALES = {"lognormal": 1.0, "math": 0.012, "search": 1.0}
"""What lengths are multiplied by: the reference's are for engines a hundred times faster."""
_MOST_TOKENS = 400
"""Of a response: the longest of the workloads, scaled."""
_TIMEOUT_S = 900.0
_SATURATED_S = 20.0
_SPARE = 8
"""Requests beyond the engine's slots: the next is at hand when one ends."""


@dataclass(frozen=True)
class Sizes:
    """The two pools and the policy, the same in every mode.

    Attributes:
        slots: requests the engine runs at once.
        step_s: slept by the engine in every forward pass.
        eta: of mode async.
        steps: measured, by mode; `skip` before them are not.
    """

    groups: int = 16
    group_size: int = 4
    slots: int = 32
    step_s: float = 0.008
    eta: int = 4
    steps: Mapping[str, int] | None = None
    skip: int = 3

    @property
    def batch(self) -> int:
        return self.groups * self.group_size

    def steps_of(self, mode: Mode) -> int:
        return (self.steps or {"sync": 10, "one_step_off": 14, "async": 30})[mode]


def run(names: Sequence[str] = tuple(WORKLOADS), sizes: Sizes | None = None) -> dict[str, Any]:
    """All modes on each workload.

    Returns:
        {"date", "machine", "load", "pools", "workloads"}; of a workload "engine" (what it samples with all slots taken), "baseline" (the
        synchronous run in the symbols of `asyncmoe.simulate.laws`), and for each mode what `_figures` says.

    Raises:
        EngineError: a run failed.
        WaitTimeout: it did not end.
    """
    sizes = sizes or Sizes()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), MadeModel(layers=2, hidden=128, experts=8, expert_hidden=128), seed=0)
        found = {name: _workload(name, Path(folder), sizes) for name in names}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "load": os.getloadavg()[0],
        "pools": {
            "engines": 1,
            "slots": sizes.slots,
            "slow_down_s": sizes.step_s,
            "trainer_ranks": 1,
            "batch": sizes.batch,
            "group_size": sizes.group_size,
            "eta": sizes.eta,
        },
        "workloads": found,
    }


def _workload(name: str, folder: Path, sizes: Sizes) -> dict[str, Any]:
    config = _config(name, folder, "sync", sizes)
    rate, few_rate = asyncio.run(_saturated(config, name, sizes))
    runs: dict[Mode, Run] = {mode: _run(_config(name, folder, mode, sizes), sizes) for mode in MODES}
    measured = {mode: _measured(run, sizes) for mode, run in runs.items()}
    base = measured["sync"]
    tokens, sync_s = base["tokens"], base["sync_s"]
    t_train, t_gen = base["train_s"], base["step_s"] - base["train_s"] - sync_s
    g, e = laws.share(t_gen, t_train), tokens / rate / t_gen
    pause_s = min(base["pause_s"], sync_s)
    bound = {"s_pools": laws.s_pools(t_gen, t_train, e, sync_s - pause_s, pause_s), "s_max": laws.s_max(g, e)}
    symbols = {"t_gen": t_gen, "t_train": t_train, "g": g, "e": e, **bound}
    modes = {}
    for mode, figures in measured.items():
        speedup = base["step_s"] / figures["step_s"]
        simulated = _simulated(name, mode, sizes, rate, few_rate, t_train, sync_s - pause_s, pause_s)
        modes[mode] = {
            **symbols,
            **figures,
            "eta": {"sync": 0, "one_step_off": 1, "async": sizes.eta}[mode],
            "speedup": speedup,
            "efficiency": speedup / bound["s_pools"],
            "engine_rate": figures["sampled_per_s"] / rate,
            "simulated_step_s": simulated,
            "simulated_over_live": simulated / figures["step_s"],
        }
    found: dict[str, Any] = _rounded({"drawn": WORKLOADS[name], "scale": SCALES[name], "tokens_per_s_all_slots": rate, "modes": modes})
    return found


def _config(name: str, folder: Path, mode: Mode, sizes: Sizes) -> Config:
    drawn = {"workload": WORKLOADS[name], "group_size": sizes.group_size, "seed": 0, "tokens": SCALES[name]}
    values: dict[str, Any] = {
        "run": {"dir": str(folder / f"{name}-{mode}"), "steps": sizes.steps_of(mode) + sizes.skip, "mode": mode},
        "model": {"path": str(folder / "model")},
        "task": {"kind": "arithmetic"},
        "environment": {"kind": "asyncmoe.bench.drawn:Drawn", "options": drawn},
        "rollout": {
            "groups_per_step": sizes.groups,
            "group_size": sizes.group_size,
            "max_new_tokens": _MOST_TOKENS,
            "max_concurrent": sizes.slots + _SPARE,
        },
        "engines": {
            "dtype": "float32",
            "max_running": sizes.slots,
            "max_total_tokens": 65536,
            "port": _free_port(),
            "args": ["--enable-mixed-chunk", "--chunked-prefill-size", "2048"],
        },
        "trainer": {"dtype": "float32", "pack": False, "recompute": "full", "checkpoint_every": 0, "optimizer": {"lr": 1e-6}},
        "telemetry": {"live": "off", "tensorboard": False},
    }
    if mode == "async":
        values["queue"] = {"staleness": {"eta": sizes.eta}}
    return configuration.parse(values)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- what the engine can do


async def _saturated(config: Config, name: str, sizes: Sizes) -> tuple[float, float]:
    """Tokens a second of the engine with all slots taken, and with an eighth of them, for as long as one measures."""
    config.run.dir.mkdir(parents=True)
    engine = Engine("engine.0", config, 0, config.run.dir)
    try:
        await engine.wait_ready()
        await _slow_down(config, sizes.step_s)
        return await _rate(engine, config, name, sizes.slots, sizes), await _rate(engine, config, name, sizes.slots // 8, sizes)
    finally:
        await engine.stop()


async def _rate(engine: Engine, config: Config, name: str, slots: int, sizes: Sizes) -> float:
    """Tokens a second of whole responses that end within `_SATURATED_S`, `slots` of them at once, all slots taken before and after."""
    tokenizer = Tokenizer(config.model.path)
    pool = Pool([engine], slots + (_SPARE if slots == sizes.slots else 0), _TIMEOUT_S, lambda *_: None)
    recording = models.recording(config, models.load_hf_config(config.model.path))
    drawn = Drawn(WORKLOADS[name], sizes.group_size, seed=1, tokens=SCALES[name])
    stage = Stage(pool, Sampling(1.0, _MOST_TOKENS, (), recording=recording), tokenizer, Exact(), drawn, timeout_s=_TIMEOUT_S)
    task, places = Arithmetic(tokenizer, ("+",), 1, seed=0), iter(range(1 << 30))

    async def play() -> None:
        while True:
            group, member = divmod(next(places), sizes.group_size)
            await episode.run(stage, task.prompt(group), Place(group, member, 0))

    # Tool calls take no slot: more episodes than slots keep all slots taken.
    playing = [asyncio.create_task(play()) for _ in range(4 * slots)]
    try:
        await asyncio.sleep(_SATURATED_S / 3)
        begin, tokens = time.monotonic(), pool.generated_tokens
        await asyncio.sleep(_SATURATED_S)
        if failed := [part for part in playing if part.done()]:
            failed[0].result()
        return (pool.generated_tokens - tokens) / (time.monotonic() - begin)
    finally:
        for part in playing:
            part.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


async def _slow_down(config: Config, seconds: float) -> None:
    url = f"http://{config.engines.host}:{config.engines.port}"
    async with aiohttp.ClientSession() as session, session.post(f"{url}/slow_down", json={"forward_sleep_time": seconds}) as reply:
        if reply.status != 200:
            raise EngineError(f"engine.0: /slow_down: status {reply.status}")


# ---------------------------------------------------------------- whole runs


def _run(config: Config, sizes: Sizes) -> Run:
    """`asyncmoe run`, with an engine that is slowed down as soon as it takes requests."""
    path = config.run.dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    log = config.run.dir.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "asyncmoe", "run", str(path)], stdout=out, stderr=out)
    try:
        asyncio.run(_slow_down_when_ready(config, sizes.step_s, process))
        status = process.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise WaitTimeout("asyncmoe run", f"the end of {config.run.dir.name}", _TIMEOUT_S) from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    if status:
        raise EngineError(f"{config.run.dir.name} ended with status {status}: {log.read_text(errors='replace')[-1500:]}")
    return load(config.run.dir)


async def _slow_down_when_ready(config: Config, seconds: float, process: subprocess.Popen[bytes]) -> None:
    client = EngineClient("engine.0", f"http://{config.engines.host}:{config.engines.port}")
    until = time.monotonic() + config.engines.start_timeout_s
    try:
        while not await client.ready():
            if process.poll() is not None:
                return
            if time.monotonic() > until:
                raise WaitTimeout("engine.0", "start", config.engines.start_timeout_s)
            await asyncio.sleep(0.1)
    finally:
        await client.close()
    await _slow_down(config, seconds)


def _measured(run: Run, sizes: Sizes) -> dict[str, Any]:
    """A run's steady state: the steps after the first `Sizes.skip`.

    Returns:
        step_s, train_s, wait_s, sync_s, pause_s: means of a step. tokens: sampled and trained in a step. sampled_per_s: by the engine.
        trainer_idle: share of the time in which it neither trained nor published. engine_idle: share in which the engine had nothing to do.
        ages: sampled tokens that were trained, by age in versions. oldest: the oldest of them. tokens_lost: sampled and thrown away because
        a response started over. dropped: trajectories, by reason.
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


def _simulated(name: str, mode: Mode, sizes: Sizes, rate: float, few_rate: float, t_train: float, sync_s: float, pause_s: float) -> float:
    """Seconds of a step by `asyncmoe.simulate`, from nothing but what was measured apart: the engine's rates, t_train and the sync."""
    few = sizes.slots // 8
    t_few, t_all = few / few_rate, sizes.slots / rate
    # t = t0 (1 + B / b0) through both points; a step that does not grow with the batch has a b0 far away.
    slope = max((t_all - t_few) / (sizes.slots - few), 1e-9)
    t0 = t_all - slope * sizes.slots
    plant = Plant(
        engines=1,
        concurrency=sizes.slots,
        step_s=t0,
        step_batch=t0 / slope,
        trainer_gpus=1,
        groups=sizes.groups,
        group_size=sizes.group_size,
        train_s=t_train,
        sync_s=sync_s,
        pause_s=pause_s,
        mode=mode,
        eta=sizes.eta,
        steps=sizes.steps_of(mode) + sizes.skip,
    )
    drawn = parse(WORKLOADS[name])
    return simulate(plant, replace(drawn, tokens=_scaled(drawn.tokens, name), last=drawn.last and _scaled(drawn.last, name))).step_s


def _scaled(tokens: Quantile, name: str) -> Quantile:
    return lambda z: np.minimum(_MOST_TOKENS, tokens(z) * SCALES[name])


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return {key: _rounded(v) for key, v in value.items()} if isinstance(value, dict) else value


def table(found: dict[str, Any]) -> str:
    """One line a mode, with the baseline it is compared to."""
    slots, batch = found["pools"]["slots"], found["pools"]["batch"]
    lines = [f"1 engine of {slots} slots, 1 trainer rank, batch {batch}; baseline: sync"]
    for name, workload in found["workloads"].items():
        lines.append(f"{name} ({workload['drawn']} x {workload['scale']})")
        for mode, m in workload["modes"].items():
            lines.append(
                f"  {mode:<12} eta {m['eta']}  step {m['step_s']:6.2f} s  speed-up {m['speedup']:4.2f} of {m['s_pools']:4.2f} "
                f"({m['efficiency']:6.1%})  g {m['g']:.2f}  e {m['e']:.2f}  trainer idle {m['trainer_idle']:5.1%}  "
                f"engine {m['engine_rate']:6.1%} of its rate  oldest {m['oldest']:.0f}  simulated {m['simulated_over_live']:.2f}"
            )
    return "\n".join(lines)
