"""A whole run with the real SGLang server, trainer and engine on one card: `python -m tests.gpu.bundle.tiny_run RESULT`.

Without a card the same on the CPU. Where SGLang's kernel wheels are missing, `bare_server` is the server. The report is left out, and
with it what only the report imports.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from asyncmoe.config import parse
from asyncmoe.launch.torchrun import TRAINER_ENVIRONMENT, free_port, torchrun
from asyncmoe.models.make import make_model
from asyncmoe.process import Child
from asyncmoe.telemetry.summary import summarise
from tests.gpu.bundle.needs import stand_ins
from tests.gpu.bundle.summary import write_outcome

STEPS = 4
CLOSE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference in nats of a log-probability between engine and trainer at the same version: old weights would be further off."""
_CONTROLLER = (
    "import sys; from pathlib import Path; from asyncmoe import config; from asyncmoe.rollout import controller; "
    "loaded = config.load(Path(sys.argv[1]), []); controller.run(loaded, loaded.run.dir)"
)
_POLL_S, _GRACE_S = 0.2, 3.0


def main() -> None:
    limit = time.monotonic() + float(os.environ.get("ASYNCMOE_BUNDLE_SECONDS", "300")) - 2 * _GRACE_S
    card = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        values = configuration(Path(folder), card)
        config = parse(values)
        assert config.model.make is not None
        make_model(config.model.path, config.model.make, seed=0)
        config.run.dir.mkdir(parents=True)
        file = config.run.dir / "config.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        try:
            _run(file, config.run.dir / "logs", limit)
            summary = summarise(config.run.dir)
        finally:
            if kept := os.environ.get("ASYNCMOE_BUNDLE_LOGS"):
                shutil.copytree(config.run.dir / "logs", Path(kept) / "tiny-run", dirs_exist_ok=True)
    dtype = values["trainer"]["dtype"]
    difference = summary["max_abs_logprob_diff_same_version"]
    figures: dict[str, tuple[Any, str]] = {
        "server": ("torch's operators" if stand_ins() else "SGLang's kernels", ""),
        "transport": (values["sync"]["transport"], ""),
        "dtype": (dtype, ""),
        "steps": (summary["steps"], "steps"),
        "logprob_difference": (difference, "nats, largest at the same version"),
        "update": (summary["sync_seconds_median"], "s"),
        "pause": (summary["pause_ms_median"], "ms"),
        "tokens_rate": (summary["tokens_per_s"], "tokens/s"),
    }
    write_outcome(Path(sys.argv[1]), figures)
    if summary["steps"] != STEPS or not summary["sync_seconds_median"]:
        sys.exit(f"steps with an update: got {summary['steps']} and {summary['sync_seconds_median']} s, expected {STEPS} and a time")
    if not isinstance(difference, float) or not difference <= CLOSE[dtype]:
        sys.exit(f"log-probabilities of engine and trainer: got a difference of {difference} nats, expected at most {CLOSE[dtype]}")


def configuration(folder: Path, card: bool) -> dict[str, Any]:
    """A tiny model on one rank and one engine; on a card both share it, in bfloat16, through CUDA IPC."""
    dtype = "bfloat16" if card else "float32"
    engines: dict[str, Any] = {"count": 1, "dtype": dtype, "max_running": 16, "max_total_tokens": 16384, "python": str(_python(folder))}
    made = {"layers": 2, "hidden": 64, "experts": 8, "experts_per_token": 2, "expert_hidden": 64}
    return {
        "run": {"dir": str(folder / "run"), "steps": STEPS},
        "model": {"path": str(folder / "model"), "make": made},
        "task": {"kind": "arithmetic", "operations": ["+"], "difficulty": 1},
        "warmup": {"steps": 2, "batch": 16},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "engines": {**engines, "first_gpu": 0} if card else engines,
        "trainer": {"ranks": 1, "dtype": dtype, "checkpoint_every": 0, "optimizer": {"lr": 1e-3}},
        "sync": {"transport": "ipc" if card else "shm", "timeout_s": 60},
        "queue": {"staleness": {"eta": 0}},
        "telemetry": {"tensorboard": False, "live": "off"},
    }


def _python(folder: Path) -> Path:
    """This Python, or a program in its place that starts `bare_server` whatever module it is told to."""
    if not stand_ins():
        return Path(sys.executable)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -m tests.gpu.bundle.bare_server "$@"\n')
    script.chmod(0o755)
    return script


def _run(file: Path, logs: Path, limit: float) -> None:
    """Controller and trainer until the trainer has ended.

    Raises:
        SystemExit: one ended badly, or they took too long.
    """
    controller = Child("controller", [sys.executable, "-c", _CONTROLLER, str(file)], logs / "controller.log")
    try:
        command = torchrun(1, ("127.0.0.1", free_port("127.0.0.1")), "asyncmoe.trainer", str(file))
        trainer = Child("trainer", [sys.executable, *command], logs / "trainer.log", TRAINER_ENVIRONMENT)
        try:
            while trainer.returncode is None and controller.returncode is None and time.monotonic() < limit:
                time.sleep(_POLL_S)
            while trainer.returncode is None and controller.returncode == 0 and time.monotonic() < limit:
                time.sleep(_POLL_S)
            status = {"trainer": trainer.returncode, "controller": controller.returncode}
        finally:
            trainer.end(_GRACE_S)
    finally:
        controller.end(_GRACE_S)
    if status["trainer"] != 0 or status["controller"] not in (None, 0):
        for log in sorted(logs.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
        sys.exit(f"a tiny run: got {status} (None: still running), expected a trainer that ends with 0; the logs are in tiny-run/")


if __name__ == "__main__":
    main()
