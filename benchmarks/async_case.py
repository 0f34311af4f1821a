"""The cases of the asynchrony benchmark: sizes, workloads, and the configuration of each mode."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.simulate.plant import Mode

WORKLOADS = {
    "lognormal": "lognormal:median=32,sigma=1,cap=256",
    "math": "math:cap=32768",
    "search": "search:median_s=0.16,sigma_s=1.5,cap_s=3.8",
}
SCALES = {"lognormal": 1.0, "math": 0.008, "search": 0.2}
"""Factor on lengths: the reference's lengths are for engines a hundred times faster."""
MOST_TOKENS = 264
"""Longest response of all workloads, scaled."""
SPARE = 8
"""Requests beyond the engine's slots, so that one is ready when another ends."""


@dataclass(frozen=True)
class PoolSizes:
    """The two pools and the policy, the same in every mode.

    Attributes:
        slots: requests the engine runs at once.
        step_s: seconds the engine sleeps in every forward pass.
        max_staleness: the bound in mode async.
        steps: measured steps by mode; the `skip` steps before them are not measured.
    """

    groups: int = 16
    group_size: int = 4
    slots: int = 32
    step_s: float = 0.075
    max_staleness: int = 4
    steps: Mapping[str, int] | None = None
    skip: int = 3

    @property
    def batch(self) -> int:
        return self.groups * self.group_size

    def steps_of(self, mode: Mode) -> int:
        return (self.steps or {"sync": 8, "one_step_off": 8, "async": 16})[mode]


def config(name: str, folder: Path, mode: Mode, sizes: PoolSizes) -> Config:
    """Return the configuration of one mode on one workload; run.dir and model.path are in `folder`."""
    drawn = {"workload": WORKLOADS[name], "group_size": sizes.group_size, "seed": 0, "tokens": SCALES[name]}
    values: dict[str, Any] = {
        "run": {"dir": str(folder / f"{name}-{mode}"), "steps": sizes.steps_of(mode) + sizes.skip, "mode": mode},
        "model": {"path": str(folder / "model")},
        "task": {"kind": "arithmetic"},
        "environment": {"kind": "benchmarks.drawn:Drawn", "options": drawn},
        "rollout": {
            "groups_per_step": sizes.groups,
            "group_size": sizes.group_size,
            "max_new_tokens": MOST_TOKENS,
            "max_concurrent": sizes.slots + SPARE,
        },
        "engines": {
            "dtype": "float32",
            "max_running": sizes.slots,
            "max_total_tokens": 65536,
            "port": _free_port(),
            "args": ["--enable-mixed-chunk", "--chunked-prefill-size", "2048"],
        },
        # A reference policy and a pass for log-probabilities before training: enough work for about a fifth of a synchronous step.
        "trainer": {"dtype": "float32", "pack": False, "recompute": "full", "checkpoint_every": 0, "optimizer": {"lr": 1e-6}},
        "objective": {"kl": {"coefficient": 1e-4}},
        "telemetry": {"tensorboard": False},
    }
    if mode == "async":
        values["queue"] = {"staleness": {"max_staleness": sizes.max_staleness}}
    return configuration.parse(values)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
