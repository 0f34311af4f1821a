"""What engines of large models have room for with every `sync.staging`, and what updates take. Arithmetic of `asyncmoe plan`, no run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from asyncmoe.plan import memory, traffic
from asyncmoe.plan.memory import LEAST, EngineMemory
from asyncmoe.plan.sizes import parse_engines, parse_trainer
from benchmarks.plans import SIZES, configuration
from benchmarks.provenance import here

MODELS = {"Qwen3-235B-A22B": False, "DeepSeek-V3": True, "Kimi-K2": True}
"""Whether they are served in float8, as published."""
SITES = {"8 x 80 GB": ("1xtp8ep8", 80.0), "8 x 141 GB": ("1xtp8ep8", 141.0), "2 x 8 x 80 GB": ("1xtp16ep16", 80.0)}
"""An engine on one machine or two, and the GB of a GPU."""
CONTEXT = 8192


def run() -> dict[str, Any]:
    """Return {"date", "machine", "context", "cases"}; a case has "model", "site", "weights" and "least" (bytes of a GPU, the latter
    without staging and KV cache), "tokens" (of an engine's KV cache, by staging), "fits" (the ways with room for `context` tokens) and
    "updates" (`asyncmoe.plan.updates.UpdateForecast`)."""
    cases = [_case(name, float8, site) for name, float8 in MODELS.items() for site in SITES]
    return {**here(), "context": CONTEXT, "cases": cases}


def table(results: Mapping[str, Any]) -> str:
    """One line a case."""
    lines = [f"{'':<17}{'an engine':<15}{'weights':>9}{'fits with staging':>21}   seconds (pause) of an update: everything, 1 %, 5 %"]
    for case in results["cases"]:
        fits = ", ".join(case["fits"]) or "nothing"
        best = next((mode for mode in case["fits"] if case["tokens"][mode] >= LEAST * results["context"]), "none") if case["fits"] else None
        pairs = [(one["seconds"], one["pauses"][best]) for one in case["updates"]] if best else []
        updates = [f"{max(seconds, pause):.2g} ({pause:.2g})" for seconds, pause in pairs]
        said = ", ".join(updates) or f"weights and working set take {case['least'] / 1e9:.1f} GB"
        lines.append(f"{case['model']:<17}{case['site']:<15}{case['weights'] / 1e9:>6.1f} GB{fits:>21}   {said}")
    return "\n".join(lines)


def _case(name: str, float8: bool, site: str) -> dict[str, Any]:
    hf, (engines, gpu_gb) = configuration(name, float8), SITES[site]
    count, parallel = parse_engines(engines)
    tokens = {staging: memory.kv_room(hf, parallel, EngineMemory(0, staging), gpu_gb) for staging in memory.STAGED}
    found = traffic.foresee(name, hf, parse_trainer(SIZES[name][0]), parallel, count)
    bare = memory.engine(hf, parallel, EngineMemory(0, "none"))
    return {
        "model": name,
        "site": site,
        "weights": bare.parts["weights"],
        "least": bare.total,
        "tokens": tokens,
        "fits": [staging for staging, room in tokens.items() if room >= CONTEXT],
        "updates": [asdict(one) for one in found.updates],
    }
