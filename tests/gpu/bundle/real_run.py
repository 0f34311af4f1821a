"""Runs of a real model side by side on one card, cut off when their time is over: `python -m tests.gpu.bundle.real_run SECONDS OUT RUN...`

A RUN is one argument, a name and overrides of examples/real/sums.yaml: `"lr-1e-5 trainer.optimizer.lr=1e-5 run.seed=1"`. OUT gets the
curves of each as JSON (`benchmarks.learning.curves`). Not a part of the bundle: the model must be there, which `make real-model` prepares.
All runs share the card, so their curves are to be read against samples, not against time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from asyncmoe import config as configuration
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.torchrun import free_port, torchrun, trainer_environment
from asyncmoe.process import Child
from benchmarks.learning import curves
from benchmarks.learning.arms import CONFIGURATION
from benchmarks.provenance import here
from tests.gpu.bundle import needs, servers, tiny_run

_POLL_S = 0.5


def main() -> None:
    seconds, out, *runs = sys.argv[1:]
    card, end = torch.cuda.is_available(), time.monotonic() + float(seconds)
    about = {**here(), "card": torch.cuda.get_device_name(0) if card else "CPU"}
    server = needs.candidates()[0]
    with tempfile.TemporaryDirectory() as folder:
        started = [Run(Path(folder, str(place)), server, card, run.split()) for place, run in enumerate(runs)]
        while time.monotonic() < end and any(run.going() for run in started):
            time.sleep(_POLL_S)
        for run in started:
            run.end()
        Path(out).write_text(json.dumps({**about, "server": server.says, "runs": [run.result() for run in started]}) + "\n")


class Run:
    """A controller, an engine and a trainer of one rank, as `tiny_run` starts them."""

    def __init__(self, folder: Path, server: servers.Server, card: bool, words: list[str]) -> None:
        folder.mkdir()
        self.name, *self._settings = words
        self._status: dict[str, int | None] = {}
        args = ["--cuda-graph-bs-decode", "8", "32", "64", "--mem-fraction-static", "0.6"] if server.graphs and card else []
        common = [
            f"run.dir={folder / 'run'}",
            f"engines.python={tiny_run.python(folder, server)}",
            f"engines.share_gpus={str(card).lower()}",
            f"sync.transport={'ipc' if card else 'shm'}",
            f"engines.args={json.dumps(args)}",
            "telemetry.tensorboard=false",
        ]
        self._config = configuration.load(CONFIGURATION, [*common, *self._settings])
        directory = self._config.run.dir
        directory.mkdir(parents=True)
        file, self._logs = directory / "config.yaml", directory / "logs"
        file.write_text(yaml.safe_dump(self._config.model_dump(mode="json"), sort_keys=False))
        self._controller = Child("controller", [sys.executable, "-c", tiny_run.CONTROLLER, str(file)], self._logs / "controller.log")
        self._engine = Child("engine.0", [sys.executable, "-c", tiny_run.ENGINE, str(file)], self._logs / "engine-0-joins.log")
        command = torchrun(1, ("127.0.0.1", free_port("127.0.0.1")), "asyncmoe.trainer", str(file))
        self._trainer = Child("trainer", [sys.executable, *command], self._logs / "trainer.log", trainer_environment(os.environ))

    def going(self) -> bool:
        return self._trainer.returncode is None and self._controller.returncode in (None, 0)

    def end(self) -> None:
        """End all at once; what is recorded stays."""
        children = {"trainer": self._trainer, "controller": self._controller, "engine.0": self._engine}
        self._status = {name: child.returncode for name, child in children.items()}
        for child in children.values():
            child.end(0)

    def result(self) -> dict[str, Any]:
        """Name, settings and curves, or why there are none."""
        found: dict[str, Any] = {"name": self.name, "settings": self._settings}
        if any(self._status.values()):
            found["failed"] = tiny_run.cause(self._status, self._logs)
            for log in sorted(self._logs.glob("*.log")):
                print(f"--- {self.name}: {log.name}\n{log.read_text(errors='replace')[-2000:]}", flush=True)
        try:
            found |= curves.of_run(self._config.run.dir, self._config.rollout.batch)
        except (AsyncmoeError, IndexError) as error:
            found.setdefault("failed", f"no curves: {error}")
        return found


if __name__ == "__main__":
    main()
