"""A whole run with the real SGLang server, trainer and engine on one card: `python -m tests.gpu.bundle.tiny_run RESULT`.

Without a card the same on the CPU. Where SGLang's kernel wheels are missing, `bare_server` is the server. The report is left out, and with
it what only the report imports.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from asyncmoe.config import Config, parse
from asyncmoe.engines.sglang.process import reason_in
from asyncmoe.launch.torchrun import free_port, torchrun, trainer_environment
from asyncmoe.models.make import make_model
from asyncmoe.process import Child
from asyncmoe.telemetry.summary import write_summary
from tests.gpu.bundle.summary import write_outcome

STEPS = 4
CLOSE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference in nats of a log-probability between engine and trainer at the same version: old weights would be further off."""
_CONTROLLER = (
    "import sys; from pathlib import Path; from asyncmoe import config; from asyncmoe.rollout import controller; "
    "loaded = config.load(Path(sys.argv[1]), []); controller.run(loaded, loaded.run.dir)"
)
_ENGINE = (
    "import sys; from pathlib import Path; from asyncmoe import config; from asyncmoe.launch import gpus; "
    "from asyncmoe.engines import engine_agent; loaded = config.load(Path(sys.argv[1]), []); "
    "engine_agent.run(loaded, 'engine.0', 0, gpus.engine_arguments(loaded, 0))"
)
_POLL_S, _GRACE_S = 0.2, 3.0


class Run:
    """A controller, an engine and a trainer of one rank, of a configuration whose model is there."""

    def __init__(self, config: Config) -> None:
        self.logs = config.run.dir / "logs"
        config.run.dir.mkdir(parents=True)
        file = config.run.dir / "config.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        trainer = torchrun(1, ("127.0.0.1", free_port("127.0.0.1")), "asyncmoe.trainer", str(file))
        self._children = {
            "controller": Child("controller", [sys.executable, "-c", _CONTROLLER, str(file)], self.logs / "controller.log"),
            "engine.0": Child("engine.0", [sys.executable, "-c", _ENGINE, str(file)], self.logs / "engine-0-joins.log"),
            "trainer": Child("trainer", [sys.executable, *trainer], self.logs / "trainer.log", trainer_environment(os.environ)),
        }

    def going(self) -> bool:
        """Whether the trainer runs, and none has failed."""
        return self._children["trainer"].returncode is None and not any(child.returncode for child in self._children.values())

    def end(self, grace_s: float = _GRACE_S) -> str:
        """End all of them; in one line why the run did not come to its end, or nothing if it did."""
        status = {name: child.returncode for name, child in self._children.items()}
        for child in reversed(self._children.values()):
            child.end(grace_s)
        if status["trainer"] == 0 and not any(status.values()):
            return ""
        for log in sorted(self.logs.glob("*.log")):
            print(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
        return self._cause(status)

    def _cause(self, status: Mapping[str, int | None]) -> str:
        """What fails by itself is said last. status: None for what had not ended."""
        for name, log in (("engine.0", "engine-0-joins"), ("controller", "controller"), ("trainer", "trainer")):
            if status[name]:
                said = [line.strip() for line in (self.logs / f"{log}.log").read_text(errors="replace").split("\n") if line.strip()]
                named = [line for line in said if line.startswith("error: ")] or said  # torchrun says last that a process failed, not why
                why = f"{name}: {named[-1] if named else f'ended with status {status[name]}'}"
                engine = self.logs / "engine-0.log"
                beneath = reason_in(engine.read_text(errors="replace")) if engine.exists() else None
                return f"{beneath} ({why})" if beneath and beneath not in why else why
        return f"it took too long; ended: {', '.join(name for name in status if status[name] is not None) or 'none'}"


def main() -> None:
    card = torch.cuda.is_available()
    end = time.monotonic() + float(os.environ.get("ASYNCMOE_BUNDLE_SECONDS", "300")) - 2 * _GRACE_S
    with tempfile.TemporaryDirectory() as folder:
        config = parse(configuration(Path(folder), card))
        assert config.model.make is not None
        make_model(config.model.path, config.model.make, seed=0)
        run = Run(config)
        while run.going() and time.monotonic() < end:
            time.sleep(_POLL_S)
        why = run.end()
        if kept := os.environ.get("ASYNCMOE_BUNDLE_LOGS"):
            shutil.copytree(run.logs, Path(kept) / "tiny-run")
        if why:
            sys.exit(f"a tiny run: {why}")
        summary = write_summary(config.run.dir)
    difference, dtype = summary["max_abs_logprob_diff_same_version"], str(config.trainer.dtype)
    figures: dict[str, tuple[Any, str]] = {
        "server": ("bare_server" if bare() else "SGLang's own", ""),
        "transport": (str(config.sync.transport), ""),
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
    """A tiny model on one rank and one engine; on a card both use it in turn, in bfloat16, through CUDA IPC."""
    dtype = "bfloat16" if card else "float32"
    engines: dict[str, Any] = {"count": 1, "dtype": dtype, "max_running": 16, "max_total_tokens": 16384}
    engines |= {"python": str(python(folder))}
    made = {"layers": 2, "hidden": 64, "experts": 8, "experts_per_token": 2, "expert_hidden": 64}
    return {
        "run": {"dir": str(folder / "run"), "steps": STEPS},
        "model": {"path": str(folder / "model"), "make": made},
        "task": {"kind": "arithmetic", "operations": ["+"], "difficulty": 1},
        "warmup": {"steps": 2, "batch": 16},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "engines": engines,
        "trainer": {"ranks": 1, "dtype": dtype, "checkpoint_every": 0, "optimizer": {"lr": 1e-3}},
        "sync": {"transport": "ipc" if card else "shm", "timeout_s": 60},
        "queue": {"staleness": {"max_staleness": 0}},
        "telemetry": {"tensorboard": False},
        "placement": "colocated" if card else "split",
    }


def bare() -> bool:
    """Whether something is missing here that SGLang imports: torchvision, whatever it serves, and on a card its kernel wheels."""
    wanted = ("torchvision", *(("sgl_kernel", "flashinfer") if torch.cuda.is_available() else ()))
    return not all(importlib.util.find_spec(name) for name in wanted)


def python(folder: Path) -> Path:
    """This Python, or a program in its place that starts `bare_server` whatever module it is told to."""
    if not bare():
        return Path(sys.executable)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -m tests.gpu.bundle.bare_server "$@"\n')
    script.chmod(0o755)
    return script


if __name__ == "__main__":
    main()
