"""A real engine gives its memory to the kernel and takes it again; what nobody has written since is named, and an update writes all of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncmoe.config import parse
from asyncmoe.config.model import MadeModel
from asyncmoe.engines.adapters import asked
from asyncmoe.engines.sglang.connection import Acknowledged
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import Memory, Sampling
from asyncmoe.errors import EngineError
from asyncmoe.models.make import make_model
from tests import families, float8
from tests.engine.conftest import PROMPT, Rig, family, running, settings
from tests.engine.oracle import Oracle
from tests.engine.test_direct import Stage

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
BOTH: tuple[Memory, ...] = ("weights", "kv_cache")
SAVER = "--enable-memory-saver"


@contextmanager
def engine(config: Any, runner: Any, *memory: str) -> Iterator[Rig]:
    with running(config, runner, start=lambda: [SGLangProcess("engine.0", config, 0, memory=(SAVER, *memory))]) as rig:
        yield rig


def charged(rig: Rig) -> int:
    """Bytes of anonymous and of shared memory of the server's processes, pages of several processes in parts."""
    found = 0
    for process in family(rig.engine):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            found += sum(int(kib) << 10 for kib in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", rollup, re.MULTILINE))
    return found


def said(rig: Rig) -> tuple[Sequence[int], Sequence[float]]:
    """The likeliest continuation and its log-probabilities, nothing of which comes from a cache."""
    sampling = Sampling(1.0, 24, (), top_k=1)
    answer = rig.run(rig.engine.client.generate(PROMPT, sampling, str(time.monotonic_ns()), 60.0, adapter=asked(rig.config)))
    return list(answer.tokens), list(answer.logprobs)
