"""Starting whole runs as a user does, and finding leftover processes."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]
ENGINES = REPOSITORY / ".venv-engine" / "bin" / "python"
MARK = "ASYNCMOE_TESTMARK"
# The smallest run with every part: a warm-up, one engine, two expert-parallel ranks.
SMALL = (
    "warmup.steps=4",
    "warmup.batch=16",
    "run.steps=3",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
)
ONE_RANK = ("trainer.ranks=1", "trainer.ep=1")
"""Where the number of ranks does not matter: each takes as long to start as all of a small run's steps."""
AGREES = "verify.max_logprob_diff=1.0e-3"
"""The run ends where engine and trainer do not agree on a token of the same version."""


class Command:
    """One `asyncmoe` command; every process it starts inherits a mark, by which it is found.

    Args:
        module: a module other than asyncmoe.
        log: file for its output, readable during the run.
        environment: variables; `MARK` to share the mark of another command.
    """

    def __init__(
        self, *arguments: str, cwd: Path | None = None, module: str = "asyncmoe", log: Path | None = None, **environment: str
    ) -> None:
        self.mark = environment.get(MARK, uuid.uuid4().hex)
        output = log.open("w") if log else subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=cwd or REPOSITORY,
            env={**os.environ, **environment, MARK: self.mark},
            stdout=output,
            stderr=output,
            text=True,
        )

    def finish(self, timeout_s: float = 240.0) -> tuple[int, str, str]:
        """Status, standard output, standard error."""
        try:
            out, error = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, error = self.process.communicate()
            raise AssertionError(f"still running after {timeout_s} s\n{out[-2000:]}\n{error[-2000:]}") from None
        return self.process.returncode, out, error

    def succeed(self, timeout_s: float = 240.0, directory: Path | None = None) -> tuple[str, str]:
        """Return its output and error output after it ends successfully without leftover processes. directory: of its run."""
        status, out, error = self.finish(timeout_s)
        assert status == 0, f"status {status}\n{out[-1500:]}\n{error[-3000:]}\n{logs(directory) if directory else ''}"
        assert self.gone(), self.alive()
        return out, error

    def alive(self) -> list[str]:
        """Return command lines of marked processes that still run."""
        return marked(self.mark)

    def gone(self, within_s: float = 20.0) -> bool:
        """Return whether every process it started has ended within that time."""
        return wait_for(lambda: not self.alive(), within_s)


def marked(mark: str) -> list[str]:
    """Command lines of running processes that inherited a mark in the variable `MARK`."""
    return [line for line in _marked(mark).values() if line]


def marked_pids(mark: str, words: str = "") -> list[int]:
    """Ids of the marked processes whose command lines contain some words, the oldest first."""
    return sorted(pid for pid, line in _marked(mark).items() if words in line)


def _marked(mark: str) -> dict[int, str]:
    """Ids and command lines of the other processes that inherited a mark. Processes that set a title lose the mark."""
    found = {}
    for entry in marked_entries(mark):
        with suppress(OSError):  # it has ended
            found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def command_line(process: psutil.Process) -> str:
    """Empty if it has ended."""
    with suppress(psutil.NoSuchProcess):  # psutil.ZombieProcess is one
        return " ".join(process.cmdline())
    return ""


def marked_entries(mark: str) -> Iterator[Path]:
    """The folders in /proc of the other processes that inherited a mark."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid() and mark.encode() in (entry / "environ").read_bytes():
                yield entry


def nccl_settings(directory: Path, mark: str) -> dict[str, str]:
    """The settings of NCCL that the trainer of a run says it has, after a look that its engines were started with the same."""
    text = "".join(path.read_text() for path in (directory / "logs").glob("trainer*.log"))
    (said,) = map(ast.literal_eval, {*re.findall(r"settings of NCCL, as engines have them: (\{.*\})$", text, re.MULTILINE)})
    engines = [Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in marked_pids(mark, "asyncmoe.platform.sglang")]
    assert engines
    assert all({f"{name}={value}" for name, value in said.items()} <= {*given} for given in engines), engines
    return dict(said)


def wait_for(condition: Callable[[], bool], seconds: float, poll_s: float = 0.1) -> bool:
    """Poll until `condition` holds; return False after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(poll_s)
    return False


def run(directory: Path, *overrides: str, timeout_s: float = 240.0) -> dict[str, Any]:
    """A whole small run of the demo's configuration; returns its summary."""
    start(directory, *overrides).succeed(timeout_s, directory)
    return summary_of(directory)


def summary_of(directory: Path) -> dict[str, Any]:
    """Return the summary of a run that has ended."""
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def start(directory: Path, *overrides: str) -> Command:
    """Start a run of the demo's configuration; see `demo`."""
    return Command(*demo(directory, *overrides))


def demo(directory: Path, *overrides: str) -> tuple[str, ...]:
    """The arguments of a run of the demo's configuration with `SMALL` sizes in `directory`; beside it lies the model, the demo's own if
    none does. A run whose overrides say how the model is made has it inside `directory`."""
    model = directory.parent / "model"
    if not model.exists():
        model = directory / "model" if any(override.startswith("model.") for override in overrides) else provide(model)
    return ("run", "examples/demo.yaml", f"run.dir={directory}", f"model.path={model}", *SMALL, *overrides)


def provide(path: Path) -> Path:
    """Put the demo's model at `path`; runs only read it."""
    path.symlink_to(Path(_made().name) / "model", target_is_directory=True)
    return path


@cache
def _made() -> tempfile.TemporaryDirectory[str]:
    """Make it once for all runs that do not test this: it takes as long as everything else before a process starts."""
    folder = tempfile.TemporaryDirectory(prefix="asyncmoe-model-")
    Command("make-model", folder.name + "/model").succeed()
    return folder


def silent_engines(folder: Path) -> str:
    """Return the override for a Python whose engines never respond and cost nothing, for runs that need only the warm-up."""
    return engine_python(folder, 'case "$*" in *platform.sglang*) exec sleep 600;; esac')


def engine_python(folder: Path, line: str) -> str:
    """Return the override for an engine Python that first executes a line of shell."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n{line}\nexec {ENGINES} "$@"\n')
    python.chmod(0o755)
    return f"engines.python={python}"


def refused(*arguments: str) -> str:
    """Run a command that must fail; return its one-line explanation. There must be no traceback and no leftover process."""
    command = Command(*arguments)
    status, out, error = command.finish(120.0)
    assert status != 0, out
    assert "Traceback" not in out + error, error[-3000:]
    assert command.gone(), command.alive()
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error[-3000:]
    return lines[0].removeprefix("error: ")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a file that may still be written; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().split("\n") if line.endswith("}")] if path.exists() else []


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The step records written so far."""
    return [record for record in json_lines(directory / "metrics.jsonl") if "step" in record]


def further(directory: Path, count: int) -> Callable[[], bool]:
    """Return the condition that this many more steps are recorded."""
    before = len(metrics(directory))
    return lambda: len(metrics(directory)) >= before + count


def generated(directory: Path) -> set[str]:
    """Engines of a run that have generated."""
    return {one["who"] for one in json_lines(directory / "spans-controller.jsonl")}


def logs(directory: Path) -> str:
    """The ends of all logs of a run."""
    return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted((directory / "logs").glob("*.log")))
