"""What a controller leaves to the next one about its engines, in a file of the run.

Each engine runs on with its own agent (`asyncmoe.engines.engine_agent`), which says which controller it served. Only an engine of
the controller directly before is taken over: the file tells what that one had its engines hold, before and after each change.
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
    """The place of a controller among those of its run.

    Attributes:
        controller: name of this controller, as engines are told it.
        epoch: its number, from 1.
        before: name of the controller before it; "" if there was none.
        weights: what the engines of that one hold.

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

    @property
    def is_first(self) -> bool:
        """Whether no controller before this one has left engines."""
        return not self.before

    def forget(self) -> None:
        """Take over no engine: what is left belongs to steps that nothing knows any more."""
        self.before, self.weights = "", EngineWeights()
        self._write(self.weights)

    async def note(self, weights: EngineWeights) -> None:
        """Keep what the engines hold; return when it is kept. Notes are kept in the order of the calls.

        Raises:
            ProtocolError: another controller has taken the place of this one.
            StorageError: the file cannot be written.
        """
        await asyncio.wrap_future(self._thread.submit(self._note, weights))

    def close(self) -> None:
        """End the thread that writes, once all notes are kept."""
        self._thread.shutdown()

    def _note(self, weights: EngineWeights) -> None:
        left = self._read()
        if left is not None and left.controller != self.controller:
            after, ours = left.epoch, self.epoch
            raise ProtocolError(f"controller {after} has taken the place of controller {ours}: this process is left over and must end")
        self._write(weights)

    def _read(self) -> _Left | None:
        with suppress(OSError, ValueError):  # a file that is damaged tells nothing, and engines start again
            return msgspec.json.decode(self._path.read_bytes(), type=_Left)
        return None

    def _write(self, weights: EngineWeights) -> None:
        with writing("what the engines hold", self._path):
            replace(self._path, msgspec.json.encode(_Left(self.controller, self.epoch, weights)))
