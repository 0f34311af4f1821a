"""A whole run with the real SGLang server, trainer and engine on one card: `python -m tests.gpu.bundle.tiny_run [SERVER...] RESULT`.

Without a card the same on the CPU. Where SGLang's kernel wheels are missing, `bare_server` is the server: the best that carries the run,
of those named or else of those that may start here (`servers`). The report is left out, and with it what only the report imports.
"""

from __future__ import annotations

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

from asyncmoe.config import parse
from asyncmoe.engines.sglang.process import reason_in
from asyncmoe.launch.torchrun import free_port, torchrun, trainer_environment
from asyncmoe.models.make import make_model
from asyncmoe.process import Child
from asyncmoe.telemetry.summary import write_summary
from tests.gpu.bundle import needs, servers
from tests.gpu.bundle.summary import write_outcome

STEPS = 4
CLOSE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference in nats of a log-probability between engine and trainer at the same version: old weights would be further off."""
CONTROLLER = (
    "import sys; from pathlib import Path; from asyncmoe import config; from asyncmoe.rollout import controller; "
    "loaded = config.load(Path(sys.argv[1]), []); controller.run(loaded, loaded.run.dir)"
)
ENGINE = (
    "import sys; from pathlib import Path; from asyncmoe import config; from asyncmoe.launch import gpus; "
    "from asyncmoe.engines import engine_agent; loaded = config.load(Path(sys.argv[1]), []); "
    "engine_agent.run(loaded, loaded.run.dir, 'engine.0', 0, gpus.engine_arguments(loaded, 0))"
)
_POLL_S, _GRACE_S = 0.2, 3.0
_RESERVE_S = 45.0
"""Kept for each server that is still to be tried, and the least that one before it is given."""
_REASON_CHARACTERS = 400


def main() -> None:
    *names, result = sys.argv[1:]
    tried = [servers.KNOWN[name] for name in names] or list(needs.candidates())
    end = time.monotonic() + float(os.environ.get("ASYNCMOE_BUNDLE_SECONDS", "300"))
    refused: dict[str, str] = {}
    for place, server in enumerate(tried):
        later = len(tried) - place - 1
        left = end - time.monotonic() - later * _RESERVE_S
        if later and left < _RESERVE_S:
            refused[server.name] = f"not tried: {left:.0f} s were left for it, expected {_RESERVE_S:.0f}"
            continue
        try:
            summary = attempt(server, time.monotonic() + left - 2 * _GRACE_S)
        except NotServed as error:
            print(f"{server.says}: {error}", flush=True)
            refused[server.name] = str(error)
            continue
        finish(Path(result), server, refused, summary)
        return
    write_outcome(Path(result), passed_over(refused))
    sys.exit(f"a tiny run: no server carried it; {'; '.join(f'{servers.KNOWN[name].says}: {why}' for name, why in refused.items())}")


class NotServed(Exception):
    """A run that did not come to its end; the message is the cause in one line."""


def attempt(server: servers.Server, limit: float) -> dict[str, Any]:
    """A whole run with a server, ended by `limit` (of `time.monotonic`); returns its summary.

    Raises:
        NotServed: the server did not start, or the run failed or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        values = configuration(Path(folder), torch.cuda.is_available(), server)
        config = parse(values)
        assert config.model.make is not None
        make_model(config.model.path, config.model.make, seed=0)
        config.run.dir.mkdir(parents=True)
        file = config.run.dir / "config.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        try:
            _run(file, config.run.dir / "logs", limit)
            return write_summary(config.run.dir)
        finally:
            if kept := os.environ.get("ASYNCMOE_BUNDLE_LOGS"):
                shutil.copytree(config.run.dir / "logs", Path(kept) / "tiny-run" / server.name, dirs_exist_ok=True)


def passed_over(refused: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """A figure for every better server that did not carry the run: why."""
    return {f"not_{name}": (why[:_REASON_CHARACTERS], servers.KNOWN[name].says) for name, why in refused.items()}


def finish(result: Path, server: servers.Server, refused: Mapping[str, str], summary: Mapping[str, Any]) -> None:
    """Write the figures.

    Raises:
        SystemExit: the run did not do what it should have. Another server is not tried: this one computed, and wrongly.
    """
    dtype = _dtype(server, torch.cuda.is_available())
    difference = summary["max_abs_logprob_diff_same_version"]
    figures: dict[str, tuple[Any, str]] = {
        "server": (server.says, ""),
        **passed_over(refused),
        "transport": ("ipc" if torch.cuda.is_available() else "shm", ""),
        "dtype": (dtype, ""),
        "steps": (summary["steps"], "steps"),
        "logprob_difference": (difference, "nats, largest at the same version"),
        "update": (summary["sync_seconds_median"], "s"),
        "pause": (summary["pause_ms_median"], "ms"),
        "tokens_rate": (summary["tokens_per_s"], "tokens/s"),
    }
    write_outcome(result, figures)
    if summary["steps"] != STEPS or not summary["sync_seconds_median"]:
        sys.exit(f"steps with an update: got {summary['steps']} and {summary['sync_seconds_median']} s, expected {STEPS} and a time")
    if not isinstance(difference, float) or not difference <= CLOSE[dtype]:
        sys.exit(f"log-probabilities of engine and trainer: got a difference of {difference} nats, expected at most {CLOSE[dtype]}")


def _dtype(server: servers.Server, card: bool) -> str:
    return "bfloat16" if card or server.triton else "float32"


def configuration(folder: Path, card: bool, server: servers.Server) -> dict[str, Any]:
    """A tiny model on one rank and one engine; on a card both share it, in bfloat16, through CUDA IPC."""
    dtype = _dtype(server, card)
    engines: dict[str, Any] = {"count": 1, "dtype": dtype, "max_running": 16, "max_total_tokens": 16384}
    engines |= {"python": str(python(folder, server)), "share_gpus": card}
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
    }


def python(folder: Path, server: servers.Server) -> Path:
    """This Python, or a program in its place that starts `bare_server` whatever module it is told to."""
    if not server.bare:
        return Path(sys.executable)
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nshift 2\nexport {servers.MODE}={server.name}\nexec {sys.executable} -m tests.gpu.bundle.bare_server "$@"\n'
    )
    script.chmod(0o755)
    return script


def _run(file: Path, logs: Path, limit: float) -> None:
    """Controller and trainer until the trainer has ended.

    Raises:
        NotServed: one ended badly, or they took too long.
    """
    controller = Child("controller", [sys.executable, "-c", CONTROLLER, str(file)], logs / "controller.log")
    engine = Child("engine.0", [sys.executable, "-c", ENGINE, str(file)], logs / "engine-0-joins.log")
    try:
        command = torchrun(1, ("127.0.0.1", free_port("127.0.0.1")), "asyncmoe.trainer", str(file))
        trainer = Child("trainer", [sys.executable, *command], logs / "trainer.log", trainer_environment(os.environ))
        try:
            while trainer.returncode is None and controller.returncode is None and not engine.returncode and time.monotonic() < limit:
                time.sleep(_POLL_S)
            while trainer.returncode is None and controller.returncode == 0 and time.monotonic() < limit:
                time.sleep(_POLL_S)
            status = {"trainer": trainer.returncode, "controller": controller.returncode, "engine.0": engine.returncode}
        finally:
            trainer.end(_GRACE_S)
    finally:
        controller.end(_GRACE_S)
        engine.end(_GRACE_S)
    if status["trainer"] != 0 or {status["controller"], status["engine.0"]} - {None, 0}:
        for log in sorted(logs.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
        raise NotServed(cause(status, logs))


def cause(status: Mapping[str, int | None], logs: Path) -> str:
    """In one line why a run did not come to its end. What fails by itself is said last.

    Args:
        status: of the processes, None: it had not ended.
    """
    for name, log in (("engine.0", "engine-0-joins"), ("controller", "controller"), ("trainer", "trainer")):
        if status.get(name) not in (None, 0):
            lines = (logs / f"{log}.log").read_text(errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            named = [line for line in said if line.startswith("error: ")] or said  # torchrun says last that a process failed, not why
            why = f"{name}: {named[-1] if named else f'ended with status {status[name]}'}"
            engine = logs / "engine-0.log"
            beneath = reason_in(engine.read_text(errors="replace")) if engine.exists() else None
            return f"{beneath} ({why})" if beneath and beneath not in why else why
    return f"it took too long; ended: {', '.join(name for name in status if status[name] is not None) or 'none'}"


if __name__ == "__main__":
    main()
