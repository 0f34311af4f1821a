"""Plans of published models from 256 trainer ranks to 128 engine ranks: time and memory of a rank to plan its part. Needs no weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median
from typing import Any

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.payload import Payload
from asyncmoe.reshard import plan
from benchmarks.memory import Growth
from benchmarks.provenance import here
from benchmarks.published import FLOAT8, REAL

_TRAINER = MegatronParallel(tp=4, pp=8, ep=8, dp=8)
SIZES = {
    "Qwen3-235B-A22B": (replace(_TRAINER, first_layers=11, last_layers=11), 8, EngineParallel(16, 16)),
    "DeepSeek-V3": (replace(_TRAINER, first_layers=5), 8, EngineParallel(16, 16)),
    "Kimi-K2": (replace(_TRAINER, first_layers=5), 8, EngineParallel(16, 16)),
    "GLM-4.5": (replace(_TRAINER, first_layers=10, last_layers=10), 8, EngineParallel(16, 16)),
    "GLM-4.5-Air": (replace(_TRAINER, first_layers=5, last_layers=5), 8, EngineParallel(16, 16)),
    "Mixtral-8x22B": (_TRAINER, 16, EngineParallel(8, 8)),
}
"""Sizes of the trainer, number of engines, and sizes of each."""
_FLOAT8 = ("DeepSeek-V3", "Kimi-K2")
"""Published in float8; planned in bfloat16 too."""


def run(rounds: int = 3) -> dict[str, Any]:
    """Plan for a trainer rank and for an engine rank, each in a separate process, `rounds` times.

    Returns:
        {"date", "machine", "load", "rounds", "cases"}; a case has "model", "trainer", "engines", "dtype" (of the sent weights), "tensors",
        and for either rank, "trainer_rank" and "engine_rank": "layouts_seconds" (of all ranks' layouts), "plan_seconds" (of its own part),
        both medians, "peak_bytes" (the largest rise of its memory, layouts included) and "bytes" (sent or received).
    """
    measured_at = here()
    cases = [(name, False) for name in SIZES] + [(name, True) for name in _FLOAT8]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        found = [_case(pool, name, float8, rounds) for name, float8 in sorted(cases, key=lambda case: list(SIZES).index(case[0]))]
    return {**measured_at, "rounds": rounds, "cases": found}


def table(results: Mapping[str, Any]) -> str:
    """Format one line per model."""
    lines = [f"{'':<18}{'travels as':>11}{'tensors':>9}{'layouts s':>11}{'plan s':>8}{'MB':>6}   slowest and largest of both ranks"]
    for case in results["cases"]:
        ranks = case["trainer_rank"], case["engine_rank"]
        layouts, seconds, peak = (max(rank[key] for rank in ranks) for key in ("layouts_seconds", "plan_seconds", "peak_bytes"))
        lines.append(f"{case['model']:<18}{case['dtype']:>11}{case['tensors']:>9}{layouts:>11.2f}{seconds:>8.2f}{peak / 1e6:>6.0f}")
    return "\n".join(lines)


def _case(pool: ProcessPoolExecutor, name: str, float8: bool, rounds: int) -> dict[str, Any]:
    trainer, engines, engine = SIZES[name]
    ranks = {
        kind: _merged([pool.submit(_planned, name, float8, rank).result() for _ in range(rounds)])
        for kind, rank in (("trainer_rank", 0), ("engine_rank", trainer.world))
    }
    tensors = len(Payload(configuration(name, float8)).tensors())
    dtype = "float8" if float8 else "bfloat16"
    return {"model": name, "trainer": str(trainer), "engines": f"{engines} x {engine}", "dtype": dtype, "tensors": tensors, **ranks}


def _planned(name: str, float8: bool, rank: int) -> dict[str, float]:
    grid, count, engine = SIZES[name]
    hf = configuration(name, float8)
    family_of(hf).check(hf, grid, engine)
    growth, begin = Growth(), time.perf_counter()
    payload = Payload(hf)
    source, destination = payload.trainer(grid, "bfloat16"), payload.engines(engine, "bfloat16", count, first=grid.world)
    tensors, middle = payload.tensors(), time.perf_counter()
    made = plan(tensors, source, destination, ranks=[rank])
    end = time.perf_counter()
    moved = sum(transfer.nbytes for transfer in made.transfers if rank in (transfer.source, transfer.destination))
    return {"layouts_seconds": middle - begin, "plan_seconds": end - middle, "peak_bytes": growth.peak_bytes(), "bytes": moved}


def configuration(name: str, float8: bool) -> dict[str, Any]:
    return {**REAL[name], "num_nextn_predict_layers": 0, **({"quantization_config": FLOAT8} if float8 else {})}


def _merged(several: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(one[key] for one in several) for key in several[0]}
