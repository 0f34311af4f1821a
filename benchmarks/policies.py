"""What each scheduling policy gains on this machine: whole runs with and without it, next to the simulator with the run's own records.

Responses have drawn lengths (lognormal, those of a group half alike), and SGLang's own options hold the engines' steps at some time. Tail
batching and probes are for rounds; prefix-affine placement is for agents on two engines, whose prompts and tools' answers are long.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from asyncmoe.simulate.command import read_plant
from asyncmoe.simulate.plant import Mode
from asyncmoe.simulate.recorded import read_recorded
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.workload import parse
from asyncmoe.telemetry.rollout_schema import Rollout
from benchmarks import async_case, async_live
from benchmarks.async_case import PoolSizes
from benchmarks.asynchrony import engine_keys, rounded
from benchmarks.provenance import here

_CHUNK = 512
"""Tokens of a pass of a prefill."""
_WORKLOADS = {"lognormal": "lognormal:median=32,sigma=1,cap=256,icc=0.5", "agents": "search:median_s=0.16,sigma_s=1,cap_s=2"}


@dataclass(frozen=True)
class PolicyCase:
    """A run.

    Attributes:
        base: the run that it is compared with; "": it is one.
        rollout: keys of the section that differ.
    """

    workload: str
    mode: Mode
    base: str = ""
    rollout: Mapping[str, Any] = field(default_factory=dict)


CASES: Mapping[str, PolicyCase] = {
    "sync": PolicyCase("lognormal", "sync"),
    "sync-tail-batching": PolicyCase("lognormal", "sync", "sync", {"tail_batching": 1.25}),
    "sync-probes-first": PolicyCase("lognormal", "sync", "sync", {"order": "probes_first"}),
    "async": PolicyCase("lognormal", "async", "sync"),
    "async-probes-first": PolicyCase("lognormal", "async", "async", {"order": "probes_first"}),
    "agents": PolicyCase("agents", "async"),
    "agents-prefix-affine": PolicyCase("agents", "async", "agents", {"balance": "prefix_affine", "affinity_slack": 8}),
}
SIZES = PoolSizes(groups=8, group_size=4, slots=40, step_s=0.03, max_staleness=2, steps={"sync": 15, "async": 20}, skip=3)


def run(
    names: Sequence[str] = tuple(CASES), sizes: PoolSizes = SIZES, done: Callable[[dict[str, Any]], None] = lambda found: None
) -> dict[str, Any]:
    """Run the cases in turn, on `Cores.halves`.

    Args:
        done: called after each case with the results until then: all cases take half an hour and more.

    Returns:
        {"date", "machine", "load", "sizes", "engine_rates", "cases"}; of a case what `async_live.measured` says, "tokens_per_s" (trained),
        "gain" (over its base, by these), "mean_age" (of trained tokens, in versions), "lost" (share of what was started that was dropped or
        rejected), and "simulated": the same figures by `asyncmoe simulate --trace` of this run, and "tokens_per_s_error", theirs over the
        run's, less 1.

    Raises:
        EngineError: a run failed.
        WaitTimeout: it did not end.
    """
    results: dict[str, Any] = {
        **here(),
        "sizes": {"groups": sizes.groups, "group_size": sizes.group_size, "slots": sizes.slots, "slow_down_s": sizes.step_s},
    }
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), MadeModel(layers=3, hidden=128, experts=8, expert_hidden=128), seed=0)
        plain = async_case.config("lognormal", Path(folder), "sync", sizes)
        rates = async_live.rates(plain, Path(folder, "rates"), "lognormal", sizes)
        results |= {"engine_rates": rounded(vars(rates)), "cases": cases}
        for name in names:
            case = CASES[name]
            config = _config(name, case, Path(folder), sizes)
            found = async_live.run(config, sizes)
            figures = async_live.measured(found, sizes)
            figures |= _summary(figures["tokens"] / figures["step_s"], figures["ages"], _lost(found.rollout[-1]))
            keys = engine_keys(rates, config.engines.max_running or sizes.slots)
            figures["simulated"] = _simulated(config, case, keys, sizes)
            figures["tokens_per_s_error"] = figures["simulated"]["tokens_per_s"] / figures["tokens_per_s"] - 1
            if case.base in cases:
                figures["gain"] = figures["tokens_per_s"] / cases[case.base]["tokens_per_s"]
                figures["simulated"]["gain"] = figures["simulated"]["tokens_per_s"] / cases[case.base]["simulated"]["tokens_per_s"]
            cases[name] = rounded(figures)
            done(results)
    return results


def _config(name: str, case: PolicyCase, folder: Path, sizes: PoolSizes) -> Config:
    values = async_case.config("lognormal", folder, case.mode, sizes).model_dump(mode="json")
    values["run"]["dir"] = str(folder / name)
    values["environment"]["options"]["workload"] = _WORKLOADS[case.workload]
    values["rollout"] |= case.rollout
    values["telemetry"]["samples"]["groups"] = 1 << 20
    values["engines"]["start_timeout_s"] = 900.0
    if case.workload == "agents":
        values["environment"]["options"] |= {"given": 600, "observed": 200, "tokens": 0.2}
        values["engines"] |= {"count": 2, "max_running": sizes.slots // 2, "args": ["--chunked-prefill-size", str(_CHUNK)]}
    return configuration.parse(values)


def _simulated(config: Config, case: PolicyCase, keys: Mapping[str, float], sizes: PoolSizes) -> dict[str, Any]:
    """What the simulator says of a run from its records; only the times of an engine's step come from elsewhere."""
    changes: dict[str, Any] = {**keys, "steps": sizes.steps_of(case.mode) + sizes.skip, "groups_per_step": sizes.groups}
    if case.workload == "agents":
        changes |= {"engines.prefill_s": keys["engines.step_s"], "engines.prefill_chunk": _CHUNK, "engines.prefix_hits": 1.0}
    plant = read_plant([f"{key}={value}" for key, value in changes.items()], read_recorded(config.run.dir))
    found = simulate(plant, parse(plant.workload), case.mode, sizes.skip)
    ages = {str(age): share * found.tokens for age, share in found.ages.items()}
    return {"oldest": found.oldest_age, **_summary(found.tokens / found.step_s, ages, found.lost)}


def _summary(tokens_per_s: float, ages: Mapping[str, float], lost: float) -> dict[str, float]:
    mean_age = sum(int(age) * count for age, count in ages.items()) / sum(ages.values())
    return {"tokens_per_s": tokens_per_s, "mean_age": mean_age, "lost": lost}


def _lost(last: Rollout) -> float:
    dropped = last.dropped if isinstance(last.dropped, int) else sum(last.dropped.values())
    return (dropped + sum(last.rejected.values())) / last.started


def table(found: dict[str, Any]) -> str:
    """One line a case."""
    lines = [
        f"{'':<22}{'tokens/s':>8}{'gain':>6}{'age':>6}{'oldest':>7}{'lost':>7}   simulated {'tokens/s':>8}{'gain':>6}{'age':>6}{'error':>8}"
    ]
    for name, one in found["cases"].items():
        simulated = one["simulated"]
        lines.append(
            f"{name:<22}{one['tokens_per_s']:8.1f}{one.get('gain', 1.0):6.2f}{one['mean_age']:6.2f}{one['oldest']:7.0f}{one['lost']:7.1%}"
            f"              {simulated['tokens_per_s']:8.1f}{simulated.get('gain', 1.0):6.2f}{simulated['mean_age']:6.2f}"
            f"{one['tokens_per_s_error']:+8.1%}"
        )
    return "\n".join(lines)
