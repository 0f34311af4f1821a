"""The folder, the file system, the clock and the network of a run under faults, and the run itself as the user's command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from asyncmoe import scratch
from asyncmoe.config.model import MadeModel
from asyncmoe.doctor import python_probe
from asyncmoe.log.files import scan
from asyncmoe.models.make import make_model
from asyncmoe.queue import records
from asyncmoe.queue.fold import LogState, fold
from tests import disks
from tests.chaos.schedule import Moment
from tests.redis_server import LocalRedis
from tests.system.runs import MARK, Command, json_lines, marked_entries, marked_pids

STAND = Path(__file__).parent / "stand"
ENGINE_PARTS = ("scheduler", "detokenizer")
_PYTHON = """#!/bin/sh
# The engines' Python: it has SGLang, as far as anybody asks, and runs the stand-in for it.
[ "$1" = - ] && {{ {python} "$@"; echo '{mark}{{"packages":{{"sglang":"0"}}}}'; exit 0; }}
exec {python} -m tests.chaos.stand.engine "$@"
"""


class World:
    """Everything around one run. Use it as a context manager; it removes what it has made.

    Attributes:
        folder: of everything; `run_dir` lies in it, on a small file system of its own if one can be mounted.
        notes: folder that the stand-ins write to.
        command: the run, if it was started.
        server: the server with its log, if the log is not in its folder.
        mounted: whether the run's disk can be filled.
    """

    warm = 0
    """Steps of the warm-up, which `trained` does not count, but the log does."""
    recovery_s = 150.0
    """Longest recovery: every limit of the configuration is far below it."""
    disk_bytes = 48 << 20

    def __init__(self, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self.run_dir, self.notes, self.temporary = self.folder / "disk" / "run", self.folder / "notes", self.folder / "t"
        self.command: Command | None = None
        self.server: LocalRedis | None = None
        self.starts, self.seed, self._mark = 0, seed, uuid.uuid4().hex
        for folder in (self.folder / "disk", self.notes, self.temporary):
            folder.mkdir()
        self.mounted = not disks.mount(self.folder / "disk", str(self.disk_bytes))
        self._shim, self._control = self.folder / "shim.so", self.folder / "shim"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(self._shim), str(STAND / "shim.c"), "-ldl"], check=True)
        self.disturb()

    def configuration(self) -> dict[str, Any]:
        """Return the run's configuration, if it is not the command's own: a step takes a fraction of a second, all limits are seconds."""
        return {
            "run": {"dir": str(self.folder / "disk" / "run"), "steps": 1_000_000, "seed": self.seed},
            "model": {"path": str(self.folder / "model")},
            "task": {"kind": "arithmetic"},
            "rollout": {
                "groups_per_step": 4,
                "group_size": 4,
                "max_new_tokens": 48,
                "max_concurrent": 32,
                "max_rejected_share": 1.0,
                "request_timeout_s": 30.0,
            },
            "queue": {"staleness": {"max_staleness": 2}, "lease_timeout_s": 60.0},
            "keep": {"routing": "off"},
            "engines": {
                "count": 2,
                "python": str(self.folder / "python"),
                "hang_timeout_s": 12.0,
                "start_timeout_s": 60.0,
                "restarts": 1000,
                "orphan_s": 20.0,
                "max_total_tokens": 4096,
            },
            "log": {"piece_tokens": 12, "keep": 12},
            "trainer": {"ranks": 2, "ep": 2, "checkpoint_every": 3, "keep_checkpoints": 2, "timeout_s": 25.0, "max_restarts": 5},
            "sync": {"timeout_s": 20.0, "verify_every": 2},
            "cluster": {"heartbeat_timeout_s": 6.0},
            "watch": {"beat_s": 0.5, "stacks_after_s": 6.0, "end_after_s": 12.0},
            "telemetry": {"tensorboard": "off", "samples": {"groups": 4}},
        }

    def __enter__(self) -> World:
        make_model(self.folder / "model", MadeModel(), seed=0)
        (self.folder / "python").write_text(_PYTHON.format(python=sys.executable, mark=python_probe.MARK))
        (self.folder / "python").chmod(0o755)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.configuration()))
        (self.notes / "published.jsonl").touch()
        return self

    def __exit__(self, *_: object) -> None:
        if self.command is not None:
            self.end_all()
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder / "disk")], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------ the run

    @property
    def said(self) -> Path:
        """File with all that the command has printed since it was started last."""
        return self.folder / f"said-{self.starts}.txt"

    def start(self) -> None:
        """Start or resume the run, with the same command."""
        self.starts += 1
        self.command = self._command(**self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "TMPDIR": str(self.temporary),
            MARK: self._mark,
            "CHAOS_FOLDER": str(self.notes),
            "CHAOS_START": str(self.starts),
            "CHAOS_SHIM": str(self._control),
            "LD_PRELOAD": str(self._shim),
        }

    def _command(self, **environment: str) -> Command:
        return Command("run", str(self.folder / "config.yaml"), module="tests.chaos.stand.supervisor", log=self.said, **environment)

    @property
    def running(self) -> bool:
        """Whether the command runs."""
        return self.command is not None and self.command.process.poll() is None

    def pids(self) -> dict[str, int]:
        """Return the processes of the run by role: supervisor, controller, worker.N, agent, rank.N, joiner.N, engine.SEED, scheduler.PID,
        detokenizer.PID."""
        found: dict[str, int] = {}
        for entry in sorted(marked_entries(self.command.mark), key=_began):
            with suppress(OSError):
                words, environ = ((entry / name).read_bytes().decode(errors="replace").split("\0") for name in ("cmdline", "environ"))
                if role := role_of(words, environ):
                    # A child that has not yet started its own program has the name of its parent, which is older.
                    found.setdefault(role if role not in ENGINE_PARTS else f"{role}.{entry.name}", int(entry.name))
        return found

    def engines(self) -> set[int]:
        """Return the main processes of the engines."""
        return {pid for role, pid in self.pids().items() if role.startswith("engine.")}

    def end_all(self) -> None:
        """Kill every process of the run."""
        for _ in range(5):
            for pid in marked_pids(self.command.mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.command.process.wait(10)

    # ------------------------------------------------------------ disturbances

    def disturb(self, clock_s: int = 0, fsync_us: int = 0) -> None:
        """Set the clock's offset and the delay of each fsync; without arguments, reset both."""
        data = struct.pack("<qq", clock_s, fsync_us)
        if not self._control.exists():
            self._control.write_bytes(data)
        with self._control.open("r+b", buffering=0) as file:  # in place: the processes map it
            file.write(data)

    def network(self, engine: str, seconds: float, **does: float) -> None:
        """Degrade the network of an engine for some seconds; see `stand.engine.Network`."""
        made = self.notes / f".network-{engine}"
        made.write_text(json.dumps({"until": time.monotonic() + seconds, **does}))
        made.replace(self.notes / f"network-{engine}.json")

    def fill(self) -> None:
        """Fill the disk of the run."""
        with suppress(OSError), (self.folder / "disk" / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        """Free space on the disk again."""
        (self.folder / "disk" / "ballast").unlink(missing_ok=True)

    # ------------------------------------------------------------ observations

    def trained(self) -> list[dict[str, Any]]:
        """Return what each start of the trainer has trained, as `invariants.newest` takes it."""
        return json_lines(self.notes / "trained.jsonl")

    def log_state(self) -> LogState:
        """Return the state in the log of a stopped run."""
        found = scan(self.run_dir / "log" / "0")
        return fold((at, records.entry(data)) for at, _, data in found if data is not None)

    def serve_log(self) -> None:
        """Restart the server if it has ended."""
        if self.server is not None and not self.server.is_running:
            self.server.start()

    def damaged(self) -> None:
        """Note that records of the log were damaged: what is trained again from here on may be in other batches."""
        with (self.notes / "trained.jsonl").open("a") as file:
            file.write('{"damaged": true}\n')

    def best(self) -> int:
        """Return the highest step that was ever trained."""
        return max((one["step"] for one in self.trained() if "step" in one), default=0)

    def wrongs(self) -> list[str]:
        """Return the violations seen by engines and ranks."""
        engines = [one for path in self.notes.glob("wrong-*.jsonl") for one in json_lines(path)]
        return [f"an engine: {one['what']}" for one in engines] + [one["fault"] for one in json_lines(self.notes / "mixed.jsonl")]

    def cuts(self) -> list[int]:
        """Return the tokens of each aborted response."""
        return [one["tokens"] for path in sorted(self.notes.glob("engine-*.jsonl")) for one in json_lines(path) if one["what"] == "cut"]

    def sign(self, moment: Moment) -> object:
        """Return what changes when a moment comes; None: it is not there at the moment."""
        match moment:
            case "staging" | "commit":
                return sum(path.read_text().count(f'"what": "{moment}"') for path in self.notes.glob("engine-*.jsonl"))
            case "checkpoint":
                return [path.name for path in (self.run_dir / "checkpoints").glob("*.writing")] or None
            case "payload":
                return sizes(self.run_dir / "log" / "1", "*")
            case _:
                return sizes(self.run_dir / "log" / "0", "*")

    def leftovers(self) -> list[str]:
        """Return temporary files of processes that have ended, which the next one would not remove."""
        for path in self.temporary.glob(scratch._NAME):
            scratch._remove_if_left(path)
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]


def _began(process: Path) -> int:
    """Return when a process began, in ticks since the machine did (proc(5)): ids of processes begin again at the lowest."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def sizes(folder: Path, pattern: str) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of change of files."""
    found = []
    for path in folder.glob(pattern):
        with suppress(OSError):
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
    return sorted(found)


def role_of(words: Sequence[str], environ: Sequence[str]) -> str:
    """Return the role of a process by its command line; "" if it is none that a fault may meet."""
    text = " ".join(words)
    if "-m tests.chaos.stand.supervisor run" in text or "-m asyncmoe run" in text:
        return "supervisor"
    if "-m asyncmoe rollout" in text:
        return "controller"
    if "-m asyncmoe worker" in text:
        return f"worker.{words[words.index('--number') + 1]}"
    if "-m asyncmoe engine" in text:
        return f"joiner.{words[words.index('--index') + 1]}"
    if "-m tests.chaos.stand.agent" in text or "-m asyncmoe.launch.torchrun" in text:
        return "agent"
    if "-m tests.chaos.stand.rank" in text or "-m asyncmoe.trainer" in text:
        return f"rank.{next((word[5:] for word in environ if word.startswith('RANK=')), '?')}"
    if "--random-seed" in words and "sglang::" not in text:
        return f"engine.{words[words.index('--random-seed') + 1]}"
    if text.startswith("sglang::"):
        return text[8:].split()[0].partition("_")[0]
    return ""
