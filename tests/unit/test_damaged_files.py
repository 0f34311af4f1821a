"""Whatever bytes of a file in a run's directory are damaged, it is read, or refused by a line that names it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from asyncmoe.engines.succession import Succession
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.slurm import outcome
from asyncmoe.log import belonging
from asyncmoe.telemetry import heartbeats, processes
from asyncmoe.telemetry.loggers import sink

WORD = "0123456789abcdef" * 4
CASES: dict[str, tuple[str, Any, Callable[[Path], object]]] = {
    "log": (belonging.MARKER, belonging.Belonging(WORD, {"run.seed": WORD}), belonging.read),
    "heartbeat": (f"{heartbeats.FOLDER}/a.json", heartbeats.Beat(WORD, 1, 1, WORD), heartbeats.read),
    "process": ("processes/a.json", processes.Recorded(WORD, WORD, WORD, 1, 1), processes.read),
    "logger": ("loggers/a.json", sink.LoggerState(id=WORD), lambda run: sink.read(run / "loggers" / "a.json")),
    "job": ("lost", (WORD, 1), lambda run: outcome.lost_before(run / "lost", WORD)),
    "engines": ("engines.json", {"controller": WORD}, lambda run: not Succession(run).before),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_is_read_or_refused(case: str, tmp_path: Path) -> None:
    name, value, read = CASES[case]
    path, good, draw = tmp_path / name, msgspec.json.encode(value), Random(case)
    path.parent.mkdir(exist_ok=True)
    for _ in range(100):
        data = bytearray(good)
        at = draw.randrange(len(data))
        data[at : at + 8] = draw.randbytes(len(data[at : at + 8]))
        path.write_bytes(data)
        with suppress(AsyncmoeError):
            read(tmp_path)
