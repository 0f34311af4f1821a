"""What each `rollout.interruption` costs on this machine: whole asynchronous runs on a real engine and a real trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any, get_args

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.config.rollout import Interruption
from asyncmoe.models.make import make_model
from benchmarks import async_case, async_live
from benchmarks.async_case import PoolSizes
from benchmarks.provenance import here


def run(updates: int = 20) -> dict[str, Any]:
    """All five ways in turn, on the same workload of drawn lengths and `Cores.halves`; nothing is slowed down.

    Returns:
        {"date", "machine", "load", "slots", "ways"}; of a way: "pause_ms" and "pause_ms_max" (how long the engine stood still for an
        update: the median and the most), "tokens_lost", "tokens_recomputed" (of prefixes that were sent again; what `retract` has the
        engine compute again is not counted by it), "sampled", all in tokens, "tokens_per_s" sampled, and "keeps_routing".

    Raises:
        EngineError: a run failed.
        WaitTimeout: it did not end.
    """
    measured_at = here()
    sizes = PoolSizes(groups=8, slots=32, step_s=0.0, steps={"async": updates})
    ways = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), MadeModel(layers=2, hidden=128, experts=8, expert_hidden=128), seed=0)
        for way in get_args(Interruption):
            config = _config(way, Path(folder), sizes)
            found = async_live.run(config, sizes)
            pauses = [step.pause_ms for step in found.rl if step.pause_ms is not None]
            last = found.rollout[-1]
            ways[way] = {
                "updates": len(pauses),
                "pause_ms": round(median(pauses), 2),
                "pause_ms_max": round(max(pauses), 2),
                "tokens_lost": last.lost_tokens,
                "tokens_recomputed": last.recomputed_tokens,
                "sampled": last.generated_tokens,
                "tokens_per_s": round(async_live.measured(found, sizes)["sampled_per_s"], 1),
                "keeps_routing": config.keep.routing != "off",
            }
    return {**measured_at, "slots": sizes.slots, "ways": ways}


def _config(way: Interruption, folder: Path, sizes: PoolSizes) -> Config:
    values = async_case.config("lognormal", folder, "async", sizes).model_dump(mode="json")
    values["run"]["dir"] = str(folder / way)
    values["rollout"] |= {"interruption": way, "max_new_tokens": 528}
    # Long enough that updates meet most responses under way; the engine is not slowed down.
    values["environment"]["options"]["workload"] = "lognormal:median=64,sigma=1,cap=512"
    if way == "retract":
        # It computes old tokens again with new weights, and reports the new routes for them.
        values["keep"]["routing"] = "off"
    return configuration.parse(values)


def table(found: dict[str, Any]) -> str:
    """A line a way."""
    lines = [f"{'':<14}{'pause ms':>9}{'most':>8}{'lost':>7}{'again':>7}{'tokens/s':>10}"]
    for way, cost in found["ways"].items():
        lost, again = cost["tokens_lost"], cost["tokens_recomputed"]
        lines.append(f"{way:<14}{cost['pause_ms']:9.1f}{cost['pause_ms_max']:8.1f}{lost:7d}{again:7d}{cost['tokens_per_s']:10.0f}")
    return "\n".join(lines)
