"""Runs of a real model side by side on one card, cut off when their time is over: `python -m tests.gpu.bundle.real_run SECONDS OUT RUN...`

A RUN is one argument, a name and overrides of examples/real/sums.yaml: `"lr-1e-5 trainer.optimizer.lr=1e-5 run.seed=1"`. OUT gets the
curves of each as JSON (`benchmarks.learning.curves`). Not a part of the bundle: the model must be there, which `make real-model` prepares.
In a run, trainer and engine use the card in turn (`placement: colocated`, so `run.mode` is sync and no token is old). All runs use it, so
curves are to be read against samples, not against time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from benchmarks.learning import curves
from benchmarks.learning.arms import CONFIGURATION
from benchmarks.provenance import here
from tests.gpu.bundle import processes

_POLL_S = 0.5


def main() -> None:
    seconds, out, *runs = sys.argv[1:]
    card, end = torch.cuda.is_available(), time.monotonic() + float(seconds)
    about = {**here(), "card": torch.cuda.get_device_name(0) if card else "CPU"}
    with tempfile.TemporaryDirectory() as folder:
        configs = {name: configured(Path(folder, name), card, words) for name, *words in map(str.split, runs)}
        started = {name: processes.Run(config) for name, config in configs.items()}
        while time.monotonic() < end and any(run.going() for run in started.values()):
            time.sleep(_POLL_S)
        for run in started.values():
            print(run.end(0), flush=True)
        found = [result(name, config, words) for (name, config), (_, *words) in zip(configs.items(), map(str.split, runs), strict=True)]
        Path(out).write_text(json.dumps({**about, "bare_server": processes.bare(), "runs": found}) + "\n")


def configured(folder: Path, card: bool, settings: list[str]) -> Config:
    folder.mkdir()
    args = ["--cuda-graph-bs-decode", "8", "32", "64", "--mem-fraction-static", "0.6"] if processes.bare() and card else []
    common = [
        f"run.dir={folder / 'run'}",
        f"engines.python={processes.python(folder) or 'null'}",
        "placement=colocated",
        f"engines.args={json.dumps(args)}",
        "telemetry.tensorboard=false",
    ]
    return configuration.load(CONFIGURATION, [*common, *settings])


def result(name: str, config: Config, settings: list[str]) -> dict[str, Any]:
    """Name, settings and curves, or why there are none."""
    found: dict[str, Any] = {"name": name, "settings": settings}
    try:
        return found | curves.of_run(config.run.dir, config.rollout.batch)
    except (AsyncmoeError, IndexError) as error:
        return found | {"failed": f"no curves: {error}"}


if __name__ == "__main__":
    main()
