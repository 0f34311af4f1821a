"""The cost of an adapter update for a real, generating engine, compared with an update of all weights of the same model."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.models import EngineParallel, adapter_of, load_hf_config, trainer_parallel
from asyncmoe.models.make import make_model
from asyncmoe.models.payload import Payload
from asyncmoe.reshard import plan
from benchmarks import sync
from benchmarks.provenance import here

RANK = 8
MODEL = MadeModel(hidden=1024, layers=1, heads=8, head_dim=64, experts=300, expert_hidden=1024)
"""4 GB in float32, nearly all of it experts, in one layer: an update waits for the current decoding step, and on a CPU a step of several
such layers takes as long as the rest of an update (three layers of a hundred experts: results/lora-2026-11-22-2cores-three-layers.json)."""
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "per expert": {"train": "lora"},
    "shared outer": {"train": "lora", "lora": {"experts": "shared_outer"}},
}


def run(updates: int = 20, trainer: Mapping[str, int] | None = None, engine: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Measure all methods; every update is published while an engine generates.

    Args:
        trainer: `ranks`, `tp`, `pp`, `ep`; engine: `tp`, `ep`.

    Returns:
        {"date", "machine", "load", "rank", "cases"}; a case has "payload_bytes" (size of the weights or the adapter),
        "moved_bytes" (on the wire, by the plan), the result of `benchmarks.sync.measure`, and "faster" (median seconds of
        a full update over this one's).

    Raises:
        EngineError: an engine or a trainer rank died.
        WaitTimeout: they did not finish.
    """
    trainer = trainer or {"ranks": 2, "tp": 1, "pp": 1, "ep": 2}
    measured_at = here()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), MODEL, seed=0)
        for name, changes in METHODS.items():
            values = {
                "run": {"dir": str(Path(folder, name.replace(" ", "-"))), "steps": 1},
                "model": {"path": str(Path(folder, "model"))},
                "task": {"kind": "arithmetic"},
                "trainer": {**trainer, "dtype": "float32"},
                "engines": {"dtype": "float32", "max_running": 64, "max_total_tokens": 16384, **(engine or {})},
                **changes,
            }
            if "train" in changes:
                values["lora"] = {"rank": RANK, "alpha": 2 * RANK, **changes.get("lora", {})}
            config = configuration.parse(values)
            cases.append({"method": name, **moved(config), **asyncio.run(sync.measure(config, updates))})
    for case in cases:
        case["faster"] = cases[0]["sync_seconds"] / case["sync_seconds"]
    return {
        **measured_at,
        "rank": RANK,
        "trainer": dict(trainer),
        "engine": dict(engine or {"tp": 1}),
        "cases": cases,
    }


def moved(config: Config) -> dict[str, int]:
    """Return the bytes of the payload, and the bytes sent for it."""
    hf = load_hf_config(config.model.path)
    payload = Payload(hf, adapter_of(config, hf))
    source = payload.trainer(trainer_parallel(config), "float32")
    target = payload.engines(EngineParallel(config.engines.tp, config.engines.ep), "float32", first=len(source))
    transfers = plan(payload.tensors(), source, target).transfers
    whole = sum(4 * math.prod(shape) for shape in payload.tensors().values())
    return {"payload_bytes": whole, "moved_bytes": sum(t.nbytes for t in transfers)}


def table(found: Mapping[str, Any]) -> str:
    """Format one line per method."""
    lines = [f"{'':<22}{'MB':>8}{'moved':>8}{'sync s':>9}{'pause ms':>10}{'most':>8}{'faster':>8}"]
    for case in found["cases"]:
        travelled = f"{case['moved_bytes'] / 1e6:.2f}"
        lines.append(
            f"{case['method']:<22}{case['payload_bytes'] / 1e6:>8.2f}{travelled:>8}{case['sync_seconds']:>9.3f}{case['pause_ms']:>10.1f}"
            f"{case['pause_ms_max']:>8.1f}{case['faster']:>8.1f}"
        )
    return "\n".join(lines)
