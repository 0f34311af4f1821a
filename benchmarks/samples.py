"""What keeping samples costs the controller and the trainer, in CPU seconds a token: both of them whole, around a scripted engine.

A program of its own (`python -m benchmarks.samples FILE PAIRS`): Megatron is prepared for this machine in it, and nothing else is. The
controller's producer, episodes, scoring and queue and one trainer rank run in turn in one process, so its CPU time is theirs. Engine,
transport, weight sync and records, which samples do not touch, are left out: what a real run spends on them makes the share smaller.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken, UserError
from benchmarks.provenance import here
from benchmarks.samples_accounts import Accounts
from benchmarks.samples_demo import demo

SIZES = {"groups_per_step": 16, "group_size": 8}
SHAPE = {"layers": 2, "hidden": 64, "experts": 8, "experts_per_token": 2, "expert_hidden": 64}
CASES = {"short": (6, 12), "long": (128, 5)}
"""Longest response in tokens, and steps of a run."""
_SETTLE = 2
"""First steps of a run, which are not measured."""
_LEAST_PAIRS = 10
_LIMIT_S = 3600.0


def run(pairs: int = 30) -> dict[str, Any]:
    """Runs with `telemetry.samples.groups` 0 and 2 (the default) in alternating order, with short and with long responses.

    Returns:
        {"date", "machine", "load", "pairs", "cases", "demo"}. Of a case: "tokens" of a step; "cpu_us_per_token" without samples (median
        over the steps of a run, mean over runs); "share" (mean over pairs of with / without - 1), "low" and "high" (its 95 % interval);
        "added_ms", "added_low_ms", "added_high_ms" (CPU time that they add to a step, mean over pairs and its 95 % interval);
        "accounted_ms" (CPU time of a step within the calls that keep samples) and "accounted" (that time over the whole of a step without
        them: on a busy machine the more exact of the two, but blind to what they cost other code); "bytes_per_token" of the files, over
        all tokens of a run. "demo": `demo`, with the accounted time of the short case as "share_of_both" (over the CPU time that controller
        and trainer take for a step there) and "share_of_all" (with the engine), and the short case's added time over the latter as
        "measured", "measured_low" and "measured_high".

    Raises:
        UserError: too few pairs.
        InvariantBroken: the measuring process failed.
    """
    if pairs < _LEAST_PAIRS:
        raise UserError("--pairs", got=pairs, expected=f"at least {_LEAST_PAIRS}")
    measured_at = here()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.json"
        arguments = [sys.executable, "-m", "benchmarks.samples", str(file), str(pairs)]
        done = subprocess.run(arguments, timeout=_LIMIT_S, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InvariantBroken(f"bench samples: {done.stderr[-2000:]}")
        cases: list[dict[str, Any]] = json.loads(file.read_text())
        whole = demo(Path(folder))
    ours = whole["controller_ms"] + whole["trainer_ms"]
    whole |= {
        "share_of_both": round(cases[0]["accounted_ms"] / ours, 5),
        "share_of_all": round(cases[0]["accounted_ms"] / whole["all_ms"], 5),
        "measured": round(cases[0]["added_ms"] / whole["all_ms"], 5),
        "measured_low": round(cases[0]["added_low_ms"] / whole["all_ms"], 5),
        "measured_high": round(cases[0]["added_high_ms"] / whole["all_ms"], 5),
    }
    return {**measured_at, "pairs": pairs, "groups_of_each_step": 2, **SIZES, "cases": cases, "demo": whole}


def table(found: dict[str, Any]) -> str:
    """A line a case."""
    lines = [f"{'':<8}{'us a token':>12}{'samples':>10}{'95 % interval':>20}{'accounted':>12}"]
    for case in found["cases"]:
        interval = f"{case['low']:.2%} to {case['high']:.2%}"
        lines.append(f"{case['name']:<8}{case['cpu_us_per_token']:12.1f}{case['share']:10.2%}{interval:>20}{case['accounted']:12.2%}")
    both, all_ = found["demo"]["share_of_both"], found["demo"]["share_of_all"]
    lines.append(f"accounted, in a run of the demo's sizes: {both:.2%} of controller and trainer, {all_:.2%} with the engine")
    low, high = found["demo"]["measured_low"], found["demo"]["measured_high"]
    lines.append(f"measured, in a run of the demo's sizes with its engine: {found['demo']['measured']:.2%} ({low:.2%} to {high:.2%})")
    return "\n".join(lines)


@dataclass
class Scripted:
    """A pool that answers at once with random tokens of the current version, and random experts."""

    most: int
    routing: Any
    random: Random
    version: int = 0
    lost_tokens: int = 0
    recomputed_tokens: int = 0

    async def generate(self, tokens: Sequence[int], sampling: Any, routed: int = 0, **_: object) -> Any:
        from asyncmoe.rollout.engines.pool import PooledGeneration
        from asyncmoe.rollout.engines.types import Generation, VersionSpan

        size = self.random.randint(max(self.most // 2, 1), self.most)
        said = (*(self.random.randrange(20, 60) for _ in range(size - 1)), sampling.stop[0])
        rows = len(tokens) + size - 1 - routed
        experts = np.tile(np.arange(self.routing.top_k, dtype="<i4"), (rows, self.routing.all_layers, 1))
        spans = (VersionSpan(str(self.version), 0, size),)
        logprobs = tuple(-4.0 - self.random.random() for _ in range(size))
        await asyncio.sleep(0)
        return PooledGeneration(Generation(said, logprobs, spans, "stop", 0, base64.b64encode(experts.tobytes()).decode()), self.version)


def measure(folder: Path, pairs: int) -> list[dict[str, Any]]:
    """See `run`; the list of cases."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rig = Rig(folder)
    found = []
    for name, (most, steps) in CASES.items():
        rig.run(most, _SETTLE + 1, groups=2)
        measured = []
        for number in range(pairs):
            order = (0, 2) if number % 2 else (2, 0)
            by_groups = {groups: rig.run(most, steps, groups) for groups in order}
            measured.append((by_groups[0], by_groups[2]))
        shares = [kept.per_token / plain.per_token - 1 for plain, kept in measured]
        added = [(kept.per_token - plain.per_token) * plain.tokens / steps for plain, kept in measured]
        calls = Accounts()
        with calls.counting():
            own = fmean(rig.run(most, steps, 2, calls).accounted for _ in range(_LEAST_PAIRS))
        per_step = fmean(plain.per_token * plain.tokens / steps for plain, _ in measured)
        share, half = interval(shares)
        more, either_way = interval(added)
        found.append(
            {
                "name": name,
                "longest_response": most,
                "tokens": round(fmean(plain.tokens / steps for plain, _ in measured)),
                "cpu_us_per_token": round(1e6 * fmean(plain.per_token for plain, _ in measured), 2),
                "share": round(share, 5),
                "low": round(share - half, 5),
                "high": round(share + half, 5),
                "added_ms": round(1e3 * more, 3),
                "added_low_ms": round(1e3 * (more - either_way), 3),
                "added_high_ms": round(1e3 * (more + either_way), 3),
                "accounted": round(own / per_step, 5),
                "accounted_ms": round(1e3 * own, 3),
                "bytes_per_token": round(fmean(kept.size / kept.tokens for _, kept in measured), 2),
                "shares": [round(one, 5) for one in shares],
            }
        )
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    return fmean(values), t95(len(values) - 1) * stdev(values) / len(values) ** 0.5


def t95(freedom: int) -> float:
    """Return Student's t for a 95 % interval (Abramowitz and Stegun, 26.7.5), within 0.2 % from 9 degrees of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Measured:
    """CPU seconds a token; tokens sampled and bytes written in the whole run; CPU seconds a step within counted calls."""

    per_token: float
    tokens: int
    size: int
    accounted: float


class Rig:
    """One model for all runs: a controller's parts around a scripted engine, and one trainer rank."""

    def __init__(self, folder: Path) -> None:
        from asyncmoe.config import parse
        from asyncmoe.config.model import MadeModel
        from asyncmoe.models import load_hf_config
        from asyncmoe.models.make import make_model
        from asyncmoe.rollout.tokenizer import Tokenizer
        from asyncmoe.trainer import loop
        from asyncmoe.trainer.model import gpt, mesh, optimizer

        self._folder, path = folder, folder / "model"
        make_model(path, MadeModel(**SHAPE), seed=0)
        self._values = {
            "run": {"dir": str(folder / "run"), "steps": 1000},
            "model": {"path": str(path)},
            "task": {"kind": "arithmetic"},
            "rollout": {**SIZES, "max_concurrent": 64},
            "trainer": {"dtype": "float32"},
            "objective": {"correction": {"weight": "token", "cap": 2.0}},
        }
        config = parse(self._values)
        self._mesh = mesh.start(config.trainer)
        self._model = gpt.build(load_hf_config(path), config, self._mesh)
        gpt.load_hf(self._model, path)
        self._adam = optimizer.build(config, self._model)
        self._replay = loop.replay(config, self._model)
        self._tokenizer = Tokenizer(path)

    def run(self, most: int, steps: int, groups: int, calls: Accounts | None = None, *, journaled: bool = False) -> Measured:
        """Train `steps` steps and measure all but the first; `calls`: what they count is reported too."""
        from asyncmoe.config import parse

        shutil.rmtree(self._folder / "run", ignore_errors=True)
        values = {**self._values, "telemetry": {"samples": {"groups": groups}}, "verify": {"probe_every": 0}}
        return asyncio.run(self._run(parse(values), most, steps, calls or Accounts(), journaled))

    def _journal(self, config: Any) -> Any:
        from asyncmoe.journal.belonging import Belonging
        from asyncmoe.journal.journal import Journal

        section, run_dir = config.journal, config.run.dir
        run_dir.mkdir(parents=True, exist_ok=True)
        belonging = Belonging.of_run(run_dir, {"run.seed": "0"})
        made = Journal.open(section.place(run_dir), belonging, segment_bytes=section.segment_bytes, max_bytes=section.max_bytes)
        made.begin(0, 0, config.rollout.batch, 0)
        return made

    async def _run(self, config: Any, most: int, steps: int, calls: Accounts, journaled: bool) -> Measured:
        from asyncmoe import models
        from asyncmoe.journal.journal import Journal, Unjournaled
        from asyncmoe.queue.bounded import BoundedQueue
        from asyncmoe.rollout import scoring, tasks
        from asyncmoe.rollout.engines.types import Sampling
        from asyncmoe.rollout.episodes import episode
        from asyncmoe.rollout.episodes.episode import RolloutContext
        from asyncmoe.rollout.pieces import Pieces
        from asyncmoe.rollout.producer import Producer
        from asyncmoe.rollout.samples import samples_of
        from asyncmoe.trainer.batch_trainer import Learner
        from asyncmoe.trainer.objective import NO_PLUGINS
        from asyncmoe.trainer.samples import TrainerSamples

        recording = models.recording(config, self._model.hf)
        batch = config.rollout.batch
        journal = self._journal(config) if journaled else Unjournaled()
        queue = BoundedQueue(
            capacity=config.queue_capacity,
            batch=batch,
            group_size=config.rollout.group_size,
            max_staleness=1,
            recording=recording,
            journal=journal,
        )
        pool = Scripted(most, recording.routing, Random(1))
        samples = samples_of(config, Pieces(self._tokenizer), 0)
        sampling = Sampling(1.0, most, (self._tokenizer.eos,), recording=recording)
        stage: Any = RolloutContext(pool, sampling, self._tokenizer, scoring.Exact())  # type: ignore[arg-type]
        stage = stage if samples is None else replace(stage, opened=samples.opened)
        task = tasks.load(config, self._tokenizer).training
        producer = Producer(queue, task, partial(episode.run, stage), config.rollout.group_size, samples=samples, journal=journal)
        kept = TrainerSamples(config, self._mesh, 0, 0 if recording.routing is None else len(recording.routing.layers))
        client: Any = _Local(queue)
        learner = Learner(config, self._model, self._adam, client, self._replay, NO_PLUGINS, kept)
        producing = asyncio.create_task(producer.run())
        each, total, begin = [], 0, time.process_time()
        for step in range(steps):
            if step == _SETTLE:
                calls.seconds = 0.0
            leased = await queue.lease(step, "rl", batch, step, 60.0)
            learner.learn(leased, "rl", step, lambda: None)
            queue.commit(step)
            pool.version = step + 1
            queue.set_version(step + 1)
            tokens, now = sum(item.sampled for item in leased.items), time.process_time()
            each.append((now - begin) / tokens)
            begin, total = now, total + tokens
        accounted = calls.seconds / (steps - _SETTLE)
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        size = sum(path.stat().st_size for path in (config.run.dir / "samples").glob("*")) if samples is not None else 0
        if isinstance(journal, Journal):
            size = journal.size
            journal.close()
        return Measured(median(each[_SETTLE:]), total, size, accounted)


@dataclass(frozen=True)
class _Local:
    """The trainer's connection to a queue in the same process."""

    queue: Any

    def ask(self, request: Any, timeout_s: float) -> tuple[Any, list[Any]]:
        """Answer a `Fetch`."""
        from asyncmoe.rpc.messages import Fetched

        frames = [bytes(frame) for frame in self.queue.fetch(request.step, request.keys, request.layers, request.masks)]
        return Fetched(request.keys), frames


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(measure(Path(scratch), int(sys.argv[2]))))
