"""What recording the experts of every token costs: an engine that generates, and the controller that takes its answers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from asyncmoe import config as configuration
from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.engines import backend
from asyncmoe.engines.decode import routed_experts
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.sglang import answer as reading
from asyncmoe.engines.types import Sampling
from asyncmoe.errors import InvariantBroken
from asyncmoe.models.make import make_model
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring import Sample, Score
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import NOTHING, Recording, Routes, Routing, encode_routes
from asyncmoe.trajectory.sent_routes import to_bytes

SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "experts": 32, "experts_per_token": 4, "expert_hidden": 128}
EPISODES, PROMPT, NEW = 16, 16, 64
"""At once; tokens of a prompt; tokens of a response."""
_TIMEOUT_S = 120.0

Cost = tuple[float, float]
"""Seconds, and seconds of processor time."""


class _Unscored:
    async def score(self, sample: Sample) -> Score:
        return Score(0.0)

    async def close(self) -> None:
        pass


def run(pairs: int = 24) -> dict[str, Any]:
    """Batches of whole episodes with and without routes in turn, the same prompts, from two live engines with a model of `SHAPE`.

    One engine captures routes in every forward pass and is asked for them, the other was started without. What is compared is thus all of
    it: capturing, sending, taking and packing. The engine whose turn it is not sleeps.

    Returns:
        tokens_per_s: median of the batches without. share: what recording takes off the tokens a second, median over pairs of
        neighbouring batches of 1 - (with / without); quartiles of the same. processor_share: what recording adds to the processor time of
        the engines and of this process, over all batches: what others do on the machine hardly changes it.

    Raises:
        EngineError, WaitTimeout: the engine did not start.
        TrajectoryRejected: it failed, or what it answered is refused.
        InvariantBroken: routes came unasked, or did not come.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, run_dir = Path(folder, "model"), Path(folder, "run")
        make_model(path, MadeModel(**SHAPE), seed=0)
        run_dir.mkdir()
        values = {"run": {"dir": str(run_dir), "steps": 1}, "model": {"path": str(path)}, "task": {"kind": "arithmetic"}}
        engines = {"dtype": "float32", "max_running": EPISODES, "max_total_tokens": 16384, "args": ["--sleep-on-idle"]}
        with_, without = (configuration.parse({**values, "engines": engines, "keep": {"routing": keep}}) for keep in ("on", "off"))
        batches = asyncio.run(_pairs(with_, without, pairs))
    shares = [1 - plain[0] / kept[0] for plain, kept in batches]
    return {
        "model": SHAPE,
        "episodes": EPISODES,
        "new_tokens": NEW,
        "pairs": pairs,
        "tokens_per_s": round(EPISODES * NEW / median(plain[0] for plain, _ in batches), 1),
        "share": round(median(shares), 4),
        "share_quartiles": [round(float(q), 4) for q in np.quantile(shares, (0.25, 0.75))],
        "processor_share": round(sum(kept[1] for _, kept in batches) / sum(plain[1] for plain, _ in batches) - 1, 4),
    }


def answer(routes: np.ndarray, routing: Routing, rounds: int = 7) -> dict[str, float]:
    """An engine's answer with `routes`, int32[tokens, layers, top_k], into what a trajectory carries.

    Returns:
        Milliseconds of processor time for 1000 tokens, medians of the rounds. In the engine: pack. In the controller: read, of the whole
        answer in JSON, which the event loop does; decode, of what is in it. The same with _unpacked for an engine that sends int32;
        read_plain: of the same answer without routes.
    """
    tokens = len(routes)
    sent = to_bytes(encode_routes(routes, routing, "bench"))
    bodies = {"": _body(tokens, sent), "_unpacked": _body(tokens, routes.tobytes()), "_plain": _body(tokens, None)}
    answers = {form: reading.answer(body).routes for form, body in bodies.items()}

    def decode(form: str) -> Routes:
        return routed_experts(answers[form], routing, tokens=tokens + 1, routed=0, key="bench")

    if not decode("") == decode("_unpacked") == encode_routes(routes, routing, "bench"):
        raise InvariantBroken("routes came out other than they went in")
    turns: dict[str, Callable[[], object]] = {"pack": lambda: to_bytes(encode_routes(routes, routing, "bench"))}
    turns |= {f"read{form}": partial(reading.answer, body) for form, body in bodies.items()}
    turns |= {f"decode{form}": partial(decode, form) for form in ("", "_unpacked")}
    spent: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            started = time.thread_time()
            turn()
            if number:
                spent[name].append((time.thread_time() - started) * 1e3)
    return {name: round(median(values) * 1000 / tokens, 4) for name, values in spent.items()}


def _body(tokens: int, routes: bytes | None) -> bytes:
    """What /generate answers for a response of so many tokens."""
    meta: dict[str, object] = {
        "finish_reason": {"type": "length", "length": tokens},
        "output_token_logprobs": [[-1.2345678, token, None] for token in range(tokens)],
        "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
    }
    if routes is not None:
        meta["routed_experts"] = base64.b64encode(routes).decode()
    return json.dumps({"output_ids": list(range(tokens)), "meta_info": meta}).encode()


async def _pairs(with_: Config, without: Config, pairs: int) -> list[tuple[Cost, Cost]]:
    """(without, with), first the one then the other way first."""
    path = with_.model.path
    recording, tokenizer = models.recording(with_, models.load_hf_config(path)), Tokenizer(path)
    engines = [backend.start(f"engine.{i}", config, i, config.run.dir) for i, config in enumerate((without, with_))]
    try:
        await asyncio.gather(*(engine.wait_ready() for engine in engines))
        plain_pool, kept_pool = (Pool([engine], EPISODES, _TIMEOUT_S, lambda *_: None) for engine in engines)

        async def plain() -> Cost:
            return await _batch(plain_pool, tokenizer, NOTHING)

        async def kept() -> Cost:
            return await _batch(kept_pool, tokenizer, recording)

        await plain(), await kept()
        return [(await plain(), await kept()) if number % 2 else (await kept(), await plain())[::-1] for number in range(pairs)]
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def _batch(pool: Pool, tokenizer: Tokenizer, recording: Recording) -> Cost:
    """A batch of episodes, from the first request to the last record."""
    random = np.random.default_rng(0)
    prompts = [Prompt("", tuple(row), "") for row in random.integers(10, 200, (EPISODES, PROMPT)).tolist()]
    sampling = Sampling(1.0, NEW, (), recording=recording)
    stage = RolloutContext(pool, sampling, tokenizer, _Unscored())
    begin, spent = time.perf_counter(), _processor_seconds()
    records = await asyncio.gather(*(episode.run(stage, prompt, EpisodeId(0, number, 0)) for number, prompt in enumerate(prompts)))
    cost = time.perf_counter() - begin, _processor_seconds() - spent
    for (record,) in records:
        if (record.routes is None) != (recording.routing is None) or len(record) != PROMPT + NEW:
            raise InvariantBroken(f"bench recording: {record.key} has {len(record)} tokens, routes: {record.routes is not None}")
    return cost


def _processor_seconds() -> float:
    """Of this process and of all it has started that still run."""
    ticks, children = {}, defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            values = file.read_text().rpartition(")")[2].split()
            pid = int(file.parent.name)
            ticks[pid] = int(values[11]) + int(values[12])
            children[int(values[1])].append(pid)
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return sum(ticks[pid] for pid in found) / os.sysconf("SC_CLK_TCK")
