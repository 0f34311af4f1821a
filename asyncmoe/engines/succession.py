"""The state of the engines that a controller leaves to its successor, in a file of the run.

Each engine keeps running under its own agent (`asyncmoe.engines.engine_agent`), which reports the controller it served. Only engines of the
immediate predecessor are taken over: the file records which weights that controller gave its engines, before and after each change.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncmoe.engines.takeover import EngineWeights
from asyncmoe.errors import ProtocolError
from asyncmoe.storage import replace, writing

FILE = "engines.json"


class _Left(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    controller: str
    epoch: int
    weights: EngineWeights


class Succession:
    """A controller's position among the controllers of its run.

    Attributes:
        controller: name of this controller, as sent to engines.
        epoch: its number, counted from 1.
        before: name of the controller before it; "" if there was none.
        weights: the weights that the predecessor's engines have.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        left = self._read()
        self.controller, self.epoch = secrets.token_hex(8), 1 if left is None else left.epoch + 1
        self.before, self.weights = ("", EngineWeights()) if left is None else (left.controller, left.weights)
        self._thread = ThreadPoolExecutor(1, "succession")
        self._write(self.weights)

    def forget(self) -> None:
        """Take over no engine: those left belong to steps that no longer exist."""
        self.before, self.weights = "", EngineWeights()
        self._write(self.weights)

    async def note(self, weights: EngineWeights) -> None:
        """Write down which weights the engines have; return when the note is durable. Notes are written in the order of the calls.

        Raises:
            ProtocolError: another controller has replaced this one.
            StorageError: the file cannot be written.
        """
        await asyncio.wrap_future(self._thread.submit(self._note, weights))

    def close(self) -> None:
        """End the writing thread, once all notes are written."""
        self._thread.shutdown()

    def _note(self, weights: EngineWeights) -> None:
        left = self._read()
        if left is not None and left.controller != self.controller:
            after, ours = left.epoch, self.epoch
            raise ProtocolError(f"controller {after} has replaced controller {ours}: this process is left over and must end")
        self._write(weights)

    def _read(self) -> _Left | None:
        with suppress(OSError, ValueError):  # a damaged file counts as none, and engines start again
            return msgspec.json.decode(self._path.read_bytes(), type=_Left)
        return None

    def _write(self, weights: EngineWeights) -> None:
        with writing("the versions of the engines", self._path):
            replace(self._path, msgspec.json.encode(_Left(self.controller, self.epoch, weights)))
