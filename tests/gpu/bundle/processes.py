"""A run's controller, engine and trainer as processes, without launcher and report, and so without what only those import.

Where SGLang's kernel wheels are missing, `bare_server` is the server.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml

from asyncmoe.config import Config
from asyncmoe.engines.sglang.process import reason_in
from asyncmoe.launch.torchrun import free_port, torchrun, trainer_environment
from asyncmoe.process import Child

GRACE_S = 3.0
_BEGIN = (
    "import logging, sys; from pathlib import Path; from asyncmoe import config; "
    "logging.basicConfig(format='%(created)f %(message)s', level=logging.INFO); loaded = config.load(Path(sys.argv[1]), []); "
)
_CONTROLLER = _BEGIN + "from asyncmoe.rollout import controller; controller.run(loaded, loaded.run.dir)"
_ENGINE = _BEGIN + (
    "from asyncmoe.launch import gpus; from asyncmoe.engines import engine_agent; "
    "engine_agent.run(loaded, 'engine.0', 0, gpus.engine_arguments(loaded, 0))"
)


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

    def end(self, grace_s: float = GRACE_S) -> str:
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


def bare() -> bool:
    """Whether this Python has SGLang, but not all that it imports: torchvision, whatever it serves, and on a card its kernel wheels."""
    wanted = ("torchvision", *(("sgl_kernel", "flashinfer") if torch.cuda.is_available() else ()))
    return bool(importlib.util.find_spec("sglang")) and not all(importlib.util.find_spec(name) for name in wanted)


def python(folder: Path) -> Path | None:
    """The engines' Python: a program that starts `bare_server` whatever module it is told to, or None, `engines.python`'s default."""
    if not bare():
        return None
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -m tests.gpu.bundle.bare_server "$@"\n')
    script.chmod(0o755)
    return script
