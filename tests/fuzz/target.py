"""A controller to be attacked: the whole controller of a run, with engines that keep their protocol in this process instead of SGLang.

`python -m tests.fuzz.target FOLDER`. A controller whose run ends as a member may end it (goodbye of all ranks, no engine left) is followed
by another in the same process; any other end is a fault, and the process exits with it. `FOLDER/vitals.jsonl` has a line a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.errors import EngineError, WeightSyncError
from asyncmoe.models.make import make_model
from asyncmoe.process import die_with_parent
from asyncmoe.rollout import controller, parts
from asyncmoe.rollout.workers.process import WorkerProcesses
from asyncmoe.rpc import keys
from tests.configs import minimal
from tests.unit.fake_engine import FakeHandle
from tests.unit.worker_fleet import lent

LAG_PERIOD_S = 0.01
END = "end"
"""File in the target's folder by which a run is ended, with the run's public key; it is deleted once that run ends or has ended."""


def config(folder: Path) -> Config:
    """Return the configuration of the run, whose parts are all small."""
    sections: dict[str, Any] = {
        "warmup": {"steps": 2, "batch": 4},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_new_tokens": 4, "max_concurrent": 8, "max_rejected_share": 1.0},
        "queue": {"staleness": {"max_staleness": 4}},
        "keep": {"routing": "off"},
        "engines": {"count": 2},
        "cluster": {"network": "127.0.0.0/8"},  # with loopback the controller listens on no port
        "sync": {"timeout_s": 5.0},
        "telemetry": {"samples": {"groups": 0}},
    }
    return minimal(folder / "run", folder / "model", 1_000_000, **sections)


class Vitals:
    """Measures the event loop and this process.

    Attributes:
        ended: how controllers have ended, by the class of the error.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.ended = path, dict[str, int]()
        self._worst, self._busiest, self._written = 0.0, 0.0, time.monotonic()

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            began, used = time.monotonic(), time.thread_time()
            await asyncio.sleep(LAG_PERIOD_S)
            self._end_run()
            now = time.monotonic()
            self._worst = max(self._worst, now - began - LAG_PERIOD_S)
            self._busiest = max(self._busiest, time.thread_time() - used)
            if now - self._written > 1.0:
                self._written = now
                self._write()

    def _end_run(self) -> None:
        """End this run if a file asks for that. A signal from outside might come between two runs, when nobody handles it."""
        asked = self._path.with_name(END)
        if asked.exists() and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL and (present := key_of(self._path.with_name("run"))):
            meant = asked.read_text()
            asked.unlink()
            if present == meant:  # else a goodbye has ended it meanwhile
                os.kill(os.getpid(), signal.SIGTERM)

    def _write(self) -> None:
        line = {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "worst_lag_s": round(self._worst, 4),
            "worst_turn_cpu_s": round(self._busiest, 4),
            "ended": self.ended,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._worst = self._busiest = 0.0


def key_of(run_dir: Path) -> str:
    """Return the public key of the present run; empty between two."""
    try:
        return json.loads((run_dir / keys.FILE_NAME).read_text())["server_public"]  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return ""


def rss_bytes(pid: int) -> int:
    """Return a process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(folder: Path) -> None:
    die_with_parent()
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("asyncmoe").setLevel(logging.CRITICAL)
    if not (folder / "model").exists():
        make_model(folder / "model", MadeModel(), seed=0)
    made, vitals = config(folder), Vitals(folder / "vitals.jsonl")
    watching: set[asyncio.Task[None]] = set()

    class Controller(controller.Controller):
        """Engines and the worker join with its start, and serve at once."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for index in range(made.engines.count):
                self._pool.join(FakeHandle(f"engine.{index}")).waiting = False
            watching.clear()
            watching.update(map(asyncio.get_running_loop().create_task, (vitals.watch(), self._work())))

        async def _work(self) -> None:
            loaded = parts.load(made)
            worker = lent(made, loaded, self)
            await worker.join()
            await worker.worker.over.wait()
            await worker.kill()
            await loaded.close()

    controller.Controller = Controller  # type: ignore[misc]
    WorkerProcesses.start = lambda self: None  # type: ignore[method-assign]
    while True:
        shutil.rmtree(made.run.dir, ignore_errors=True)
        made.run.dir.mkdir(parents=True)
        try:
            controller.run(made, made.run.dir)
            end = "goodbye"
        except (EngineError, WeightSyncError) as error:  # a member may abort an update, which fences engines
            end = type(error).__name__
        vitals.ended[end] = vitals.ended.get(end, 0) + 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
