"""The same faults in a run with two real engines and two real ranks: the demo at the smallest sizes, seen from the outside."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from asyncmoe.telemetry.schema import CONTROLLER_SPANS, TRAINER_SPANS
from tests.chaos.schedule import KINDS, Kind, Moment
from tests.chaos.world import World, sizes
from tests.system.runs import Command, json_lines, metrics

WARM, BATCH = 4, 16
SHAPE = (
    "run.steps=1000000",
    f"warmup.steps={WARM}",
    "warmup.batch=16",
    "warmup.lr=1e-9",  # a random model hardly ever ends a response
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=32",
    "rollout.max_rejected_share=1.0",
    "rollout.request_timeout_s=60",
    "scoring.scorer=tests.unit.scorers:length",
    "engines.count=2",
    "engines.hang_timeout_s=20",
    "engines.orphan_s=20",
    "engines.restarts=1000",
    "log.piece_tokens=8",
    "trainer.checkpoint_every=3",
    "trainer.timeout_s=30",
    "trainer.max_restarts=5",
    "sync.timeout_s=60",
    "sync.verify_every=3",
    "cluster.heartbeat_timeout_s=10",
    "watch.beat_s=1",
    "watch.stacks_after_s=20",
    "watch.end_after_s=40",
    "telemetry.samples.groups=4",
)
_PARTS = ("scheduler.0", "scheduler.1", "detokenizer.0", "detokenizer.1")
REAL: dict[Kind, tuple[float, tuple[str, ...]]] = {
    kind: (share, (*targets, *(_PARTS if kind in ("kill", "stop", "hang") else ())))
    for kind, (share, targets) in KINDS.items()
    if kind not in ("drop", "delay", "half")
}
"""Kinds and targets here: the network is the machine's own, and engines have parts."""


class RealWorld(World):
    """See `World`."""

    warm = WARM
    recovery_s = 420.0
    disk_bytes = 512 << 20

    def _command(self, **environment: str) -> Command:
        places = (f"run.dir={self.run_dir}", f"model.path={self.folder / 'model'}", f"run.seed={self.seed}")
        return Command("run", "examples/demo.yaml", *places, *SHAPE, log=self.said, **environment)

    def trained(self) -> list[dict[str, Any]]:
        return trained(self.run_dir)

    def best(self) -> int:
        return max((one["step"] - WARM for one in metrics(self.run_dir)), default=0)

    def wrongs(self) -> list[str]:
        return []

    def cuts(self) -> list[int]:
        return []

    def sign(self, moment: Moment) -> object:
        match moment:
            case "staging":
                return sizes(self.run_dir, TRAINER_SPANS)
            case "commit":
                return sizes(self.run_dir, CONTROLLER_SPANS)
            case _:
                return super().sign(moment)


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """What each start of a real trainer has trained, as `invariants.newest` takes it. Steps are counted from the end of the warm-up; one
    that was broken off is none."""
    found: list[dict[str, Any]] = []
    steps: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for one in [*json_lines(run_dir / "samples" / "trainer.jsonl"), {"record": "begin", "step": -1}]:
        if one["record"] == "trained" and one["step"] > WARM:
            steps[one["step"] - WARM].append((one["key"], one["digest"]))
        elif one["record"] == "begin":
            found += [_step(step, sorted(held), len(found)) for step, held in sorted(steps.items()) if len(held) == BATCH]
            steps.clear()
            if one["step"] >= 0:
                found.append({"resumed_at": max(0, one["step"] - WARM)})
    return found


def _step(step: int, held: list[tuple[str, int]], start: int) -> dict[str, Any]:
    return {"step": step, "start": start, "keys": [key for key, _ in held], "digests": [digest for _, digest in held]}
