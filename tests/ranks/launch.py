"""Runs a worker script on ranks of this machine and returns rank 0's result."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


Checks = Mapping[tuple[str, ...], Sequence[str]]
"""By what is tried, such as a layout and a variant of the model: its checks."""


def marked(every: Checks, few: Checks) -> list[Any]:
    """Parameters of a test, one per check; most only in a thorough test."""
    several = [(one, how) for one, checks in every.items() for how in checks]
    return [pytest.param(*one, how, marks=() if how in few.get(one, ()) else pytest.mark.thorough) for one, how in several]


def run(worker: str, ranks: int, out: Path, *arguments: str, timeout_s: float = 600.0) -> Any:
    """Start `worker` (a file beside this one) on `ranks` gloo ranks; the JSON it writes to its first argument.

    A worker that fails or takes longer than `timeout_s` fails the test with the end of its output. Ranks are forked from a process that has
    imported Megatron (forks.py); with a torch for GPUs, whose driver a forked process cannot use, torchrun starts them.
    """
    result, log = out / f"{worker}-{ranks}.json", out / f"{worker}-{ranks}.log"
    started = _torchrun if torch.version.cuda else _forked
    code = started(str(HERE / f"{worker}.py"), [str(result), *arguments], ranks, log, timeout_s)
    if code != 0:
        pytest.fail(f"{worker} on {ranks} ranks: {code}\n{log.read_text()[-6000:]}", pytrace=False)
    return json.loads(result.read_text())


def by_layout(
    worker: str, layouts: Mapping[str, tuple[int, str]], wanted: Checks, references: Path, timeout_s: float, alone: bool = False
) -> Callable[[str], Any]:
    """Results of a worker by layout, computed when a test asks: one launch a world size, with all of its layouts that are wanted.

    Args:
        layouts: by name: ranks and settings.
        wanted: by a layout's name and what is tried in it.
        alone: each layout gets a launch of its own: groups over which a model has trained keep their threads, and at hundreds of groups
            the threads take all the time.
    """

    @functools.cache
    def launched(ranks: int, *names: str) -> dict[str, Any]:
        given = {name: "+".join("/".join((what, *how)) for (at, what), how in wanted.items() if at == name) for name in names}
        words = [f"{layouts[name][1]}:{tried}" for name, tried in given.items()]
        results = run(worker, ranks, references, str(references), *words, timeout_s=timeout_s)
        return {name: results[layouts[name][1]] for name in names}

    def of(layout: str) -> Any:
        ranks = layouts[layout][0]
        together = dict.fromkeys(name for name, _ in wanted if layouts[name][0] == ranks)
        return launched(ranks, *([layout] if alone else together))[layout]

    return of


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{HERE.parent.parent}"}


def _forked(script: str, arguments: list[str], ranks: int, log: Path, timeout_s: float) -> object:
    """Run a script; return its status, or a message if it took too long."""
    log.touch()
    if _forks().poll() is not None:
        _forks.cache_clear()
    forks = _forks()
    job = {"script": script, "arguments": arguments, "ranks": ranks, "log": str(log), "environment": _environment()}
    forks.stdin.write(json.dumps(job).encode() + b"\n")
    group = int(_said(forks, 120.0))  # the first job waits for the imports
    try:
        return int(_said(forks, timeout_s))
    except TimeoutError:
        os.killpg(group, signal.SIGKILL)
        _said(forks, 60.0)
        return f"no end after {timeout_s} s"


@functools.cache
def _forks() -> subprocess.Popen[bytes]:
    """Start the process from which this process's ranks are forked; it ends when this one does."""
    pipe, command = subprocess.PIPE, [sys.executable, "-m", "tests.ranks.forks"]
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=_environment(), cwd=HERE.parents[1], bufsize=0, start_new_session=True)
    atexit.register(started.communicate, timeout=60.0)
    return started


def _said(forks: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Return its next line.

    Raises:
        TimeoutError: none came.
    """
    line, until = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        if not select.select([forks.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError(f"tests.ranks.forks said nothing within {timeout_s} s")
        if not (more := forks.stdout.read(1)):
            pytest.fail(f"tests.ranks.forks has ended with {forks.wait(10)}", pytrace=False)
        line += more
    return line.decode()


def _torchrun(script: str, arguments: list[str], ranks: int, log: Path, timeout_s: float) -> object:
    """As `_forked`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, "-m", f"tests.ranks.{Path(script).stem}", *arguments],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"no end after {timeout_s} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
