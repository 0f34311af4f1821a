"""The process of a rollout worker: load what episodes need, join the run, and serve until the run ends. Also the workers that the
controller starts beside itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, UserError, WaitTimeout
from asyncmoe.process import Child, freeze, keep_files, named
from asyncmoe.rollout import parts
from asyncmoe.rollout.async_tasks import cancelled
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.workers.service import WorkerService
from asyncmoe.rpc import address, keys
from asyncmoe.rpc.async_client import AsyncClient
from asyncmoe.rpc.peers import facts
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerJoin
from asyncmoe.telemetry import heartbeats

log = logging.getLogger(__name__)
_JOIN_S, _GRACE_S, _LOOK_S = 630.0, 5.0, 0.5
"""`_JOIN_S` is long: the controller answers a join only once the worker has tried the scorer and read the records of groups in progress."""


def process_name(number: int) -> str:
    """Return the name of a worker's process in records and logs."""
    return f"rollout.{number}"


def check_number(config: Config, number: int) -> None:
    """Refuse a worker number that the run does not have. Raises UserError."""
    workers = config.rollout.workers
    if not 1 <= number <= workers:
        raise UserError("--number", got=number, expected=f"1 to {workers}, because rollout.workers is {workers}")


def run(config: Config, run_dir: Path, number: int) -> None:
    """Serve until the run ends, or SIGTERM.

    Args:
        number: which of the run's `rollout.workers` it is, from 1.

    Raises:
        UserError: the task, scorer, environment or tokenizer is unusable, which is also reported to the controller; or this machine has no
            address in `cluster.network`.
        ConfigError: the controller's configuration differs, or has no such worker.
        WaitTimeout: the controller did not start, or has ended.
    """
    with named(process_name(number)):
        keep_files()
        try:
            loaded: RolloutParts | UserError = parts.load(config)  # outside the loop: users' code may run a loop of its own
        except UserError as error:
            loaded = error
        parts.run(_serve(config, run_dir, number, loaded))


async def _serve(config: Config, run_dir: Path, number: int, loaded: RolloutParts | UserError) -> None:
    worker = WorkerService(config, number, loaded, models.recording(config, models.hf_config_of(config)))
    here_only = not address.several(config.cluster.network)
    host = address.reachable(config.cluster.network)
    try:
        async with Server(worker.answer, host=host, here_only=here_only) as server:
            rendezvous = await server.start()
            serving = asyncio.create_task(server.serve())
            controller = await asyncio.to_thread(keys.read, run_dir, config.engines.start_timeout_s)
            await _join(config, controller, number, rendezvous)
            # Before this, signals end the process, whatever it waits for: a run may end before a restarted worker has joined.
            for signal_ in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(signal_, worker.over.set)
            freeze()
            tasks = [serving, *map(asyncio.create_task, (worker.over.wait(), watch(config, worker)))]
            done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await cancelled(left)
            for task in done:
                task.result()
    finally:
        await worker.close()
        if isinstance(loaded, RolloutParts):
            await loaded.close()


async def _join(config: Config, controller: Rendezvous, number: int, rendezvous: Rendezvous) -> None:
    name = process_name(number)
    client = AsyncClient(controller, controller.controller)
    try:
        await client.ask(WorkerJoin(number, rendezvous, config.digest, facts(name)), _JOIN_S)
    finally:
        client.close()


async def watch(config: Config, worker: WorkerService) -> None:
    """Watch whether the controller keeps asking for news; never returns.

    Raises:
        WaitTimeout: it has not asked for `cluster.heartbeat_timeout_s` seconds.
    """
    began, limit, parent = time.monotonic(), config.cluster.heartbeat_timeout_s, os.getppid()
    while True:
        heartbeats.beat("runs episodes")
        worker.pool.look()
        silent = time.monotonic() - max(began, worker.heard)
        if silent > limit or os.getppid() != parent:
            raise WaitTimeout("the controller", "it no longer asks for news", silent)
        await asyncio.sleep(_LOOK_S)


class WorkerProcesses:
    """The workers of this machine; none unless `rollout.start_workers`."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._children: dict[int, Child] = {}
        self._restarts: Counter[int] = Counter()

    def start(self) -> None:
        """Start all. Call it from the main thread, because Linux ends a worker when the thread that started it ends.

        Raises:
            StorageError: a log cannot be opened.
            AsyncmoeError: the system cannot start a process.
        """
        rollout = self._config.rollout
        for number in range(1, rollout.workers + 1 if rollout.start_workers else 1):
            self._children[number] = self._started(number)

    async def watch(self, lost: Callable[[], Collection[tuple[str, int]]]) -> None:
        """Restart workers that have ended; never returns.

        Args:
            lost: returns host and process id of workers that do not answer, which are killed first.

        Raises:
            AsyncmoeError: one has ended more than `engines.restarts` times.
            StorageError: as `start`.
        """
        host, most = socket.gethostname(), self._config.engines.restarts
        while True:
            hanging = {pid for where, pid in lost() if where == host}
            for number, child in self._children.items():
                if child.returncode is None and child.pid in hanging:
                    child.kill()
                if child.returncode is None:
                    continue
                if self._restarts[number] >= most:
                    raise AsyncmoeError(f"{child.why()}; engines.restarts = {most} allows no further restart")
                self._restarts[number] += 1
                log.warning("%s; it starts again, restart %d", child.why(), self._restarts[number])
                self._children[number] = self._started(number)
            await asyncio.sleep(_LOOK_S)

    def end(self) -> None:
        """Wait for the workers to end, ask those that still run to end, and kill those that do not. Blocks for at most 10 s: the launcher
        waits for 20 s."""
        until = time.monotonic() + _GRACE_S
        late = [child for child in self._children.values() if not child.wait(max(0.0, until - time.monotonic()))]
        with ThreadPoolExecutor(max(1, len(late))) as threads:
            list(threads.map(lambda child: child.end(_GRACE_S), late))

    def _started(self, number: int) -> Child:
        name, log = process_name(number), self._run_dir / "logs" / f"rollout-{number}.log"
        command = [sys.executable, "-m", "asyncmoe", "worker", str(self._run_dir / "config.yaml"), "--number", str(number)]
        return Child(name, command, log)
