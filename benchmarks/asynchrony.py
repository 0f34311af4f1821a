"""The gain of asynchrony on this machine: the three modes of `run.mode` with real engines and a real trainer, compared with the closed-form
laws.

Response lengths are drawn, not determined by the model; SGLang's own /slow_down sets a minimum for an engine's step; and in every mode
engine and controller have half of the cores, the trainer the other half: two fixed pools of hardware, as the two-pool law assumes.
Everything else is an ordinary `asyncmoe run`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from asyncmoe.simulate import laws
from asyncmoe.simulate.plant import MODES, Mode, Plant
from asyncmoe.simulate.simulation import simulate
from asyncmoe.simulate.workload import Quantile, parse
from benchmarks import async_live
from benchmarks.async_case import MOST_TOKENS, SCALES, WORKLOADS, PoolSizes, config
from benchmarks.async_live import Rates
from benchmarks.cores import Cores
from benchmarks.provenance import here


def run(names: Sequence[str] = tuple(WORKLOADS), sizes: PoolSizes | None = None) -> dict[str, Any]:
    """Run all modes on each workload.

    Returns:
        {"date", "machine", "load", "pools", "workloads"}; for a workload `async_live.Rates` before and after the runs, and for each mode
        the synchronous run's figures in the symbols of `asyncmoe.simulate.laws`, the result of `async_live.measured` for the mode's run,
        "speedup" (trained tokens per second over sync's), "efficiency" (speedup over s_pools), "engine_rate" (sampled tokens per
        second over the rate with all slots taken) and the simulated seconds of a step.

    Raises:
        EngineError: a run failed.
        WaitTimeout: a run did not end.
    """
    measured_at = here()
    sizes = sizes or PoolSizes()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), MadeModel(layers=5, hidden=128, experts=8, expert_hidden=128), seed=0)
        found = {name: _workload(name, Path(folder), sizes) for name in names}
    return {
        **measured_at,
        "pools": {
            "engines": 1,
            "slots": sizes.slots,
            "cores": {pool: sorted(cores) for pool, cores in asdict(Cores.halves()).items()},
            "slow_down_s": sizes.step_s,
            "trainer_ranks": 1,
            "batch": sizes.batch,
            "group_size": sizes.group_size,
            "max_staleness": sizes.max_staleness,
        },
        "workloads": found,
    }


def _workload(name: str, folder: Path, sizes: PoolSizes) -> dict[str, Any]:
    # Before and after: the speed of a shared machine varies.
    first = async_live.rates(config(name, folder, "sync", sizes), folder / f"{name}-before", name, sizes)
    measured = {mode: async_live.measured(async_live.run(config(name, folder, mode, sizes), sizes), sizes) for mode in MODES}
    last = async_live.rates(config(name, folder, "sync", sizes), folder / f"{name}-after", name, sizes)
    rates = Rates(*(fmean(pair) for pair in zip(astuple(first), astuple(last), strict=True)))
    rate, base = rates.working, measured["sync"]
    tokens, sync_s = base["tokens"], base["sync_s"]
    t_train, t_gen = base["train_s"], base["step_s"] - base["train_s"] - sync_s
    g, e = t_gen / (t_gen + t_train), tokens / rate / t_gen
    pause_s = min(base["pause_s"], sync_s)
    bound = {"s_pools": laws.s_pools(t_gen, t_train, e, sync_s - pause_s, pause_s), "s_max": laws.s_max(g, e)}
    symbols = {"t_gen": t_gen, "t_train": t_train, "g": g, "e": e, **bound}
    modes = {}
    for mode, figures in measured.items():
        # Per token, because the modes' batches differ in length.
        speedup = (figures["tokens"] / figures["step_s"]) / (base["tokens"] / base["step_s"])
        simulated = _simulated(name, mode, sizes, rates, t_train, sync_s - pause_s, pause_s)
        modes[mode] = {
            **symbols,
            **figures,
            "max_staleness": {"sync": 0, "one_step_off": 1, "async": sizes.max_staleness}[mode],
            "speedup": speedup,
            "efficiency": speedup / bound["s_pools"],
            "engine_rate": figures["sampled_per_s"] / rate,
            "simulated_step_s": simulated,
            "simulated_over_live": simulated / figures["step_s"],
        }
    measured_rates = {"before": asdict(first), "after": asdict(last)}
    found: dict[str, Any] = _rounded({"drawn": WORKLOADS[name], "scale": SCALES[name], "engine_rates": measured_rates, "modes": modes})
    return found


def _simulated(name: str, mode: Mode, sizes: PoolSizes, rates: Rates, t_train: float, sync_s: float, pause_s: float) -> float:
    """Simulate a step's seconds, only from separate measurements: the engine's rates, t_train and the sync."""
    plant = Plant().having(
        {
            "engines.count": 1,
            "engines.max_running": sizes.slots,
            **_engine_keys(rates, sizes.slots),
            "trainer.gpus": 1,
            "groups_per_step": sizes.groups,
            "group_size": sizes.group_size,
            "trainer.step_s": t_train,
            "sync.seconds": sync_s,
            "sync.pause_s": pause_s,
            "max_staleness": sizes.max_staleness,
            "steps": sizes.steps_of(mode) + sizes.skip,
        }
    )
    drawn = parse(WORKLOADS[name])
    scaled = replace(drawn, tokens=_scaled(drawn.tokens, name))
    return simulate(plant, scaled, mode, sizes.skip).step_s


def _engine_keys(rates: Rates, slots: int) -> dict[str, float]:
    """Return the times of an engine with `slots` slots as keys of a plant."""
    few = slots // 8
    t_few, t_all = few / rates.few, slots / rates.decoding
    # A step of the workload is longer by a pass over prompts, if any of the slots' responses ended in the step before.
    prefill_s = max(0.0, slots / rates.working - t_all) / (1 - math.exp(-slots / rates.tokens))
    # t = t0 (1 + B / b0) through both points; for a step that does not grow with the batch, b0 is very large.
    slope = max((t_all - t_few) / (slots - few), 1e-9)
    t0 = t_all - slope * slots
    return {"engines.step_s": t0, "engines.step_batch": t0 / slope, "engines.prefill_s": prefill_s}


def _scaled(tokens: Quantile, name: str) -> Quantile:
    return lambda z: np.minimum(MOST_TOKENS, tokens(z) * SCALES[name])


def _rounded(value: Any) -> Any:
    """Return nested values with floats of four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    return {key: _rounded(v) for key, v in value.items()} if isinstance(value, dict) else value


def table(found: dict[str, Any]) -> str:
    """Format one line per mode, with the baseline it is compared to."""
    slots, batch = found["pools"]["slots"], found["pools"]["batch"]
    lines = [f"1 engine of {slots} slots, 1 trainer rank, batch {batch}; baseline: sync"]
    for name, workload in found["workloads"].items():
        lines.append(f"{name} ({workload['drawn']} x {workload['scale']})")
        for mode, m in workload["modes"].items():
            lines.append(
                f"  {mode:<12} max_staleness {m['max_staleness']}  step {m['step_s']:6.2f} s  "
                f"speed-up {m['speedup']:4.2f} of {m['s_pools']:4.2f} "
                f"({m['efficiency']:6.1%})  g {m['g']:.2f}  e {m['e']:.2f}  trainer idle {m['trainer_idle']:5.1%}  "
                f"engine {m['engine_rate']:6.1%} of its rate  oldest {m['oldest']:.0f}  simulated {m['simulated_over_live']:.2f}"
            )
    return "\n".join(lines)
