"""Synthetic run directories, written with the real writers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, EVALUATION, METRICS, ROLLOUT, TRAINER_SPANS, Resume, Span, Step
from tests.configs import minimal

START = 1_790_000_000.0
ENGINES = ("engine.0", "engine.1")


def config_of(run_dir: Path, steps: int, **telemetry: object) -> Config:
    """The configuration of a run with two steps of warm-up and no TensorBoard."""
    return minimal(run_dir, steps=steps, warmup={"steps": 2}, telemetry={"tensorboard": "off", **telemetry})


def write_run(run_dir: Path, *, warmup: int = 20, rl: int = 60, first: int = 1, start: float = START, wait: float = 0.4) -> float:
    """A run that learns: steps `first` to `warmup + rl`, about two seconds each. Returns when it ended; appends if there is a run."""
    draw, now, rl_begins = random.Random(first), start, start
    files = (JsonLines(run_dir / name) for name in (METRICS, TRAINER_SPANS, CONTROLLER_SPANS))
    with next(files) as metrics, next(files) as spans, next(files) as engines:
        if first > 1:
            metrics.write(Resume(first - 1, start))
        for step in range(first, warmup + rl + 1):
            if step <= warmup:
                metrics.write(Step(step=step, phase="warmup", time=now + 0.5, step_seconds=0.5, loss=3.0 / step, tokens=640, lr=1e-3))
                spans.write(Span("trainer.0", "train", now, now + 0.45))
                now = rl_begins = now + 0.5
                continue
            edges = [*accumulate((wait * draw.uniform(0.1, 1.9), draw.uniform(1.0, 1.4), draw.uniform(0.25, 0.4)), initial=now)]
            for what, begin, end in zip(("wait", "train", "sync"), edges, edges[1:], strict=False):
                spans.write(Span("trainer.0", what, begin, end))  # type: ignore[arg-type]
            now, pause = edges[-1], draw.uniform(0.02, 0.06)
            for engine in ENGINES:
                engines.write(Span(engine, "generate", edges[0], now - draw.choice((0.1, 0.3))))
                engines.write(Span(engine, "pause", now - pause, now))
            metrics.write(_rl_step(draw, step, warmup, rl, edges, pause))
    _rollout(run_dir, draw, rl_begins, now, warmup)
    with JsonLines(run_dir / EVALUATION) as evaluations:
        for version in range(max(first - 1, warmup), warmup + rl, 10):
            evaluations.write(evaluation(version, 0.2 + 0.01 * (version - warmup)))
    return now


def evaluation(version: int, reward: float | None, **more: object) -> Evaluation:
    """An evaluation of 64 questions, a quarter of which failed."""
    passed = {"1": reward, "4": min(1.0, 1.5 * reward)} if reward is not None else {}
    values = {
        "pass_at": passed,
        "pass_at_stderr": dict.fromkeys(passed, 0.06),
        "reward_stderr": 0.05,
        "failed": {"scorer_timeout": 16},
        "failed_share": 0.25,
        "seconds": 2.0,
        **more,
    }
    return Evaluation(time=START + version, version=version, questions=64, episodes=64, reward_mean=reward, **values)  # type: ignore[arg-type]


def _rl_step(draw: random.Random, step: int, warmup: int, rl: int, edges: Sequence[float], pause: float) -> Step:
    progress = (step - warmup) / rl
    tokens = draw.randrange(1800, 2200)
    young = draw.randrange(900, 1300)
    return Step(
        step=step,
        phase="rl",
        time=edges[-1],
        step_seconds=edges[-1] - edges[0],
        wait_seconds=edges[1] - edges[0],
        train_seconds=edges[2] - edges[1],
        sync_seconds=edges[3] - edges[2],
        pause_ms=1000 * pause,
        version=step - 1,
        loss=draw.gauss(0.01, 0.02),
        reward_mean=min(1.0, 0.15 + 0.8 * progress + draw.gauss(0, 0.04)),
        reward_std=0.4,
        rewards={0.0: round(64 * (1 - progress)), 0.5: 5, 1.0: round(64 * progress)},
        grad_norm=draw.uniform(0.5, 1.2) * (1.3 - progress),
        lr=1e-4,
        tokens=tokens,
        tokens_per_s=tokens / (edges[-1] - edges[0]),
        staleness_max=1,
        staleness_mean=1 - young / 1500,
        ages={0: young, 1: 1500 - young},
        rejected_by_rule={"token_band": draw.uniform(0, 0.01)},
        routing_mismatch={0: 0.05, 1: draw.uniform(0.1, 0.15)},
        response_tokens_mean=4.2,
        response_tokens_quantiles={"0.1": 2.0, "0.5": 4.0, "0.9": 7.0, "1.0": float(draw.randrange(8, 12))},
        entropy=2.0 - progress + draw.gauss(0, 0.05),
    )


def _rollout(run_dir: Path, draw: random.Random, begin: float, end: float, version: int) -> None:
    with JsonLines(run_dir / ROLLOUT) as lines:
        started = 0
        for second in range(1, int(end - begin)):
            started += draw.randrange(40, 90)
            lines.write(
                Rollout(
                    time=begin + second,
                    version=version + second // 2,
                    queue_depth=draw.randrange(0, 128),
                    running=draw.randrange(20, 64),
                    started=started,
                    accepted=started - 10,
                    rejected={"scorer_timeout": 1},
                    tokens_per_s=draw.uniform(700, 1100),
                    engine_utilization={engine: draw.uniform(0.85, 1.0) for engine in ENGINES},
                )
            )
