"""One run on this machine: the controller with its engines, the trainer under torchrun, and a live view of both.

The supervisor starts both processes, watches them, and ends both whatever happens. Ctrl-C is passed to the controller, which
tells the trainer at its next step to save a checkpoint; the same command then goes on from there. A second Ctrl-C ends
everything at once.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import yaml

from asyncmoe import checkpoints, models
from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ConfigError, UserError
from asyncmoe.models.lora import peft
from asyncmoe.models.lora.adapter import check_rank, kind_of
from asyncmoe.models.make import make_model
from asyncmoe.process import Child
from asyncmoe.rollout import adapters
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.report import report
from asyncmoe.telemetry.schema import METRICS
from asyncmoe.telemetry.summary import write_summary

_STOP_GRACE_S = 20.0
_POLL_S = 0.25
_INTERRUPTED = 130
"""Status of a command that Ctrl-C reached before it had set itself up to be asked."""
TRAINER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""One OpenMP thread a rank: more ranks than cores would otherwise spin against each other and against the engines."""


def run(path: Path, overrides: Sequence[str] = ()) -> dict[str, object]:
    """Run a configuration from start to end and return its summary.

    Raises:
        UserError: the configuration, the model or the run directory cannot be used.
        AsyncmoeError: a process failed; the message is the one it gave.
    """
    config = configuration.load(path, overrides)
    with claim(config.run.dir):
        return _supervise(config, prepare(config))


def prepare(config: Config) -> Path:
    """Check everything that can be checked before a process starts; return the configuration file all processes read."""
    if config.model.make is not None and not config.model.path.exists():
        make_model(config.model.path, config.model.make, seed=config.run.seed)
    hf = models.load_hf_config(config.model.path)
    models.check(config, hf)
    _check_adapter(config, hf)
    newest = checkpoints.newest(config.run.dir)
    if newest is not None and not config.run.resume:
        raise ConfigError(
            "run.dir", got=f"{config.run.dir} with {newest.name}", expected="a new directory", cure="set run.resume=true or another run.dir"
        )
    if newest is None:
        for stale in (
            "metrics.jsonl",
            "rollout.jsonl",
            "evaluation.jsonl",
            "spans-trainer.jsonl",
            "spans-controller.jsonl",
            "summary.json",
            "report.html",
        ):
            (config.run.dir / stale).unlink(missing_ok=True)
        shutil.rmtree(config.run.dir / "tensorboard", ignore_errors=True)
    config.run.dir.mkdir(parents=True, exist_ok=True)
    file = resolved(config)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    temporary.replace(file)
    return file


def resolved(config: Config) -> Path:
    """The configuration file that all processes of a run read: defaults and overrides are in it."""
    return config.run.dir / "config.yaml"


def claim(directory: Path) -> IO[str]:
    """Make a run directory, and keep other runs out of it until what is returned is closed.

    Raises:
        UserError: another run is in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError("run.dir", got=f"{directory}, in use by another run", expected="a directory of its own") from None
    except OSError as error:
        # A shared file system without locks, as Lustre is without -o flock. The controller still refuses a second one of the run.
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
    return lock


def _supervise(config: Config, resolved: Path) -> dict[str, object]:
    logs = config.run.dir / "logs"
    stop = _StopOnSignal()
    children: list[Child] = []
    view = LiveView(config)
    try:
        with view:
            controller = Child("controller", [sys.executable, "-m", "asyncmoe", "rollout", str(resolved)], logs / "controller.log")
            children.append(controller)
            trainer = Child("trainer", trainer_command(config, resolved), logs / "trainer.log", TRAINER_ENVIRONMENT)
            children.append(trainer)
            _watch(controller, trainer, view, stop)
    finally:
        for child in reversed(children):
            child.end(_STOP_GRACE_S)
        stop.restore()
    if stop.count and not read_steps(config.run.dir / METRICS):
        raise AsyncmoeError("stopped before the first step; the same command begins anew")
    summary = write_summary(config.run.dir)
    report(config.run.dir)
    if stop.count:
        raise AsyncmoeError(f"stopped at a checkpoint; the same command goes on from {checkpoints.newest(config.run.dir)}")
    return summary


def _check_adapter(config: Config, hf: Mapping[str, Any]) -> None:
    """Refuse an adapter that the engines have no room for, and one to start from that is another's."""
    section = config.adapter
    if section is None:
        return
    kind, limit = kind_of(section), adapters.limit_in(config.engines.args)
    check_rank(kind, kind.rank if limit is None else limit)
    if section.start is not None:
        peft.start_from(section.start, models.family_of(hf).shape_of(hf), kind, str(config.model.path), kind.rank)


def trainer_command(config: Config, resolved: Path, module: str = "asyncmoe.trainer", *arguments: str) -> list[str]:
    """torchrun for all trainer ranks on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(config.trainer.ranks), "--max-restarts", "0"]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [sys.executable, *launcher, *rendezvous, "-m", module, str(resolved), *arguments]


def _watch(controller: Child, trainer: Child, view: LiveView, stop: _StopOnSignal) -> None:
    told = 0
    while trainer.returncode is None or controller.returncode is None:
        view.refresh()
        if stop.count > told:
            told = stop.count
            if told > 1:
                raise AsyncmoeError("ended at once; what was not in a checkpoint is lost")
            view.say("stopping: saving a checkpoint (Ctrl-C again ends at once)")
            controller.signal(signal.SIGINT)
        if stop.count and controller.returncode in (0, _INTERRUPTED):  # all was said, or there was no trainer yet to say it to
            trainer.wait(_STOP_GRACE_S)
            break
        for child in (controller, trainer):
            if child.returncode not in (None, 0):
                raise _failure(child, controller, trainer)
        if trainer.returncode == 0 and not controller.wait(_STOP_GRACE_S):
            raise AsyncmoeError(f"the controller did not end within {_STOP_GRACE_S:.0f} s of the trainer; its log is {controller.log}")
        if controller.returncode == 0 and not trainer.wait(_STOP_GRACE_S):
            raise AsyncmoeError(f"the controller ended before the trainer; its log is {controller.log}")
        time.sleep(_POLL_S)
    view.refresh()


def _failure(child: Child, *children: Child) -> AsyncmoeError:
    """The first cause: a process that lost its peer says so too, so the one with a reason of its own is asked first."""
    time.sleep(1.0)
    failed = [c for c in children if c.returncode not in (None, 0)]
    reasons = [c.why() for c in failed]
    first = next((r for r in reasons if "waited" not in r and "ended with status" not in r), reasons[0] if reasons else child.why())
    return AsyncmoeError(first)


class _StopOnSignal:
    """Counts SIGINT and SIGTERM instead of raising in the middle of something."""

    def __init__(self) -> None:
        self.count = 0
        self._old = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
