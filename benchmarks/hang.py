"""What one hung engine of two costs the other: when it is fenced, and how fast the other generates meanwhile and after.

Two real engines, each held by SGLang's own /slow_down at steps that leave the cores mostly idle, so that neither has more of the machine
when the other stops. A process of one of them is stopped (SIGSTOP) again and again, each time when its replacement serves.
"""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from asyncmoe.telemetry.schema import METRICS, ROLLOUT
from benchmarks.live_run import LiveRun
from benchmarks.provenance import here
from benchmarks.running_engines import RunningEngine

FAULTS = {"scheduler": "sglang::scheduler", "main": ""}
"""Part of the command line of the process that is stopped; "": the engine's main process. The detokenizer is not among them: requests are
token ids, so it has no part in them, and an engine whose detokenizer is stopped samples as before."""
HANG_S, STEP_S, TOKENS, SLOTS = 12.0, 0.1, 12, 16
BEFORE_S, AFTER_S = 12.0, 10.0
_START_S = 300.0
_SHAPE = (
    "warmup.steps=0",
    "run.steps=100000",
    "environment.kind=benchmarks.drawn:Drawn",
    f"environment.options={{workload: 'fixed:tokens={TOKENS}', group_size: 4}}",
    "rollout.groups_per_step=32",
    "rollout.group_size=4",
    f"rollout.max_new_tokens={TOKENS}",
    f"rollout.max_concurrent={2 * SLOTS}",
    "queue.staleness.max_staleness=4",
    "engines.count=2",
    f"engines.max_running={2 * SLOTS}",
    f"engines.hang_timeout_s={HANG_S}",
    "engines.restarts=100",
    "trainer.optimizer.lr=1.0e-5",
    "telemetry.tensorboard=false",
)


def run(faults: Sequence[str] = tuple(FAULTS), rounds: int = 3, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Stop a process of an engine `rounds` times, for each fault in a run of its own.

    Args:
        earlier: results of other faults, which are kept.

    Returns:
        {"hang_timeout_s", "step_ms", "cases": by fault}. Of a case: "date", "machine", "load"; "fenced_s" (longest, from the stop), and
        tokens a second of the other engine relative to its half of both engines' before: "silent" from the stop until the fence, "after" in
        the `AFTER_S` from the fence on (medians of the rounds), "least" of all of "silent", and "rounds" with the figures of each.

    Raises:
        InvariantBroken: a run ended.
        WaitTimeout: an engine was not fenced, or not replaced.
    """
    kept = dict((earlier or {}).get("cases", {}))
    cases = {fault: {**here(), **_case(fault, rounds)} for fault in faults}
    return {"hang_timeout_s": HANG_S, "step_ms": round(1e3 * STEP_S), "cases": kept | cases}


def _case(fault: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        live = LiveRun("hang", Path(folder), _SHAPE)
        try:
            live.wait(lambda: any(one.get("phase") == "rl" for one in live.records(METRICS)), "no step", _START_S)
            found = [_round(live, number % 2, FAULTS[fault]) for number in range(rounds)]
        finally:
            live.end()
    shares = {name: round(median(one[name] for one in found), 3) for name in ("silent", "after")}
    least = min(one["silent"] for one in found)
    return {"fenced_s": max(one["fenced_s"] for one in found), **shares, "least": least, "rounds": found}


def _round(live: LiveRun, index: int, title: str) -> dict[str, float]:
    """Hang engine `index`, and wait until its replacement serves."""
    engines = [_engine(live, one) for one in range(2)]
    for engine in engines:
        engine.slow_down(STEP_S)
    time.sleep(2 * TOKENS * STEP_S)
    begin = time.time()
    time.sleep(BEFORE_S)
    said, process = len(live.log("controller.log")), engines[index].process
    hung = next(one for one in [process, *process.children(recursive=True)] if title in " ".join(one.cmdline()))
    hung.send_signal(signal.SIGSTOP)
    stopped = time.time()

    def tells(text: str) -> bool:
        return re.search(rf"engine\.{index} {text}", live.log("controller.log")[said:]) is not None

    live.wait(lambda: tells("is fenced"), "no fence", 10 * HANG_S)
    fenced = time.time()
    time.sleep(AFTER_S)
    live.wait(lambda: tells("has started again"), "no replacement", _START_S)
    share = _rate(live, begin, stopped) / 2
    live.wait(lambda: _both(live), "the replacement does not serve", _START_S)
    return {
        "fenced_s": round(fenced - stopped, 2),
        "before_tokens_per_s": round(share, 1),
        "silent": round(_rate(live, stopped, fenced) / share, 3),
        "after": round(_rate(live, fenced, fenced + AFTER_S) / share, 3),
    }


def _engine(live: LiveRun, index: int) -> RunningEngine:
    """An engine; of those that took its place, the newest."""
    return max((one for one in live.engines() if one.seed % 2 == index), key=lambda one: one.seed)


def _rate(live: LiveRun, begin: float, end: float) -> float:
    """Tokens a second of both engines between two Unix times, from the newest records at or before them."""
    seen = live.records(ROLLOUT)
    first, last = (max((one for one in seen if one["time"] <= at), key=lambda one: float(one["time"])) for at in (begin, end))
    return float(last["generated_tokens"] - first["generated_tokens"]) / float(last["time"] - first["time"])


def _both(live: LiveRun) -> bool:
    """Whether both engines take requests."""
    return bool(live.records(ROLLOUT)[-1]["engines_serving"] == 2)


def table(found: dict[str, Any]) -> str:
    """A line a fault."""
    lines = [f"{'stopped':<14}{'fenced after':>14}{'while silent':>14}{'after':>10}   of the other engine's tokens/s before"]
    for name, case in found["cases"].items():
        lines.append(f"{name:<14}{case['fenced_s']:>12.1f} s{case['silent']:>13.0%}{case['after']:>10.0%}")
    return "\n".join(lines)
