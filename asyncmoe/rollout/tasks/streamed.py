"""Rows that are read as they are needed: a thread reads ahead, and prompts take rows by number.

The n-th row of a stream is the same in every run with the same seed as long as the data set is. To resume, the rows before it are read
again.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

from asyncmoe import plugins
from asyncmoe.config.task import ColumnsSection, WeightedSource
from asyncmoe.errors import AsyncmoeError, DataError
from asyncmoe.rollout.tasks import datasets_reader
from asyncmoe.rollout.tasks.encode import Encoder, identity
from asyncmoe.rollout.tasks.jsonl import line_of
from asyncmoe.rollout.tasks.order import EVALUATION
from asyncmoe.rollout.tasks.rows import Keep, keeps, none_left
from asyncmoe.rollout.tasks.types import Demonstration, Example, Prompt

WINDOW = 1000
"""Rows among which a stream is shuffled."""
AHEAD = 256
"""Rows that the thread reads ahead."""
REMEMBERED = 4096
"""Latest rows that are kept, because a prompt may be asked again."""
ROW_S = 120.0
"""Time limit for the next row, in seconds."""


class RowStream:
    """A data set that `datasets` streams.

    Args:
        key: section of the source, for messages.

    Raises:
        ConfigError, DataError: see `asyncmoe.rollout.tasks.datasets_reader.load`.
    """

    def __init__(self, source: WeightedSource, key: str, *, left_out: frozenset[bytes] = frozenset(), data: Any = None) -> None:
        self._source, self._key, self._left_out = source, key, left_out
        self._columns, self._keep = source.columns or ColumnsSection(), keeps(source, key)
        self.name = f"{key}.path {source.path}"
        loaded = datasets_reader.load(source, key, streaming=True) if data is None else data
        self._data = datasets_reader.only(loaded, self._columns, source)

    def without(self, left_out: frozenset[bytes]) -> RowStream:
        """Return the stream without the prompts of these identities."""
        return RowStream(self._source, self._key, left_out=left_out, data=self._data)

    def head(self, size: int) -> list[Example]:
        """Return the first rows, in the order of the data set.

        Raises:
            DataError: there are fewer.
        """
        found = list(islice((one for one in self._examples(self._data) if one is not None), size))
        if len(found) < size:
            raise DataError(self.name, got=f"{len(found)} rows", expected=f"more than the {size} held out for evaluation.prompts")
        return found

    def epochs(self, seed: int) -> Iterator[Example]:
        """Yield the rows of every epoch, shuffled within `WINDOW`, without end.

        Raises:
            DataError: a row cannot be used, or no row of an epoch is left.
        """
        shuffled = self._data.shuffle(seed=seed, buffer_size=WINDOW)
        for epoch in count():
            shuffled.set_epoch(epoch)
            rows, yielded = 0, False
            for example in self._examples(shuffled):
                rows += 1
                if example is not None and (not self._left_out or identity(example.prompt) not in self._left_out):
                    yielded = True
                    yield example
            if not yielded:
                raise none_left(self.name, rows)

    def _examples(self, data: Any) -> Iterator[Example | None]:
        """Yield each row, None if it is not kept."""
        keep: Keep = self._keep or (lambda where, values: True)
        for row, values in enumerate(data):
            where = f"{self.name}, row {row} of the shuffled stream"
            yield line_of(where, values, self._columns).example if keep(where, values) else None


class Numbered:
    """The items of an endless iterator by number, read ahead by a thread. A number far behind the latest starts the iterator anew.

    Args:
        make: returns the iterator, from its start.
        name: of the source, for messages.
    """

    def __init__(self, make: Callable[[], Iterator[Example]], name: str) -> None:
        self._make, self._name = make, name
        self._known: OrderedDict[int, Example] = OrderedDict()
        self._next = 0
        self._reader = _Reader(make())

    def __getitem__(self, number: int) -> Example:
        """Return an item.

        Raises:
            DataError: reading failed, or the next row takes longer than `ROW_S`.
        """
        if number < self._next and number not in self._known:
            self._reader.stop()
            self._known.clear()
            self._next, self._reader = 0, _Reader(self._make())
        while self._next <= number:
            self._known[self._next] = self._reader.take(self._name)
            self._next += 1
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return self._known[number]


class _Reader:
    """A thread that reads an iterator into a bounded queue; its failure is the last item."""

    def __init__(self, items: Iterator[Example]) -> None:
        self._items, self._stopped = items, threading.Event()
        self._read: queue.Queue[Example | BaseException] = queue.Queue(AHEAD)
        threading.Thread(target=self._run, name="task stream", daemon=True).start()

    def take(self, name: str) -> Example:
        try:
            item = self._read.get(timeout=ROW_S)
        except queue.Empty:
            raise DataError(name, got=f"no row within {ROW_S:g} s", expected="rows", hint="look at the network, or download it") from None
        if isinstance(item, AsyncmoeError):
            raise item
        if isinstance(item, BaseException):
            raise DataError(name, got=plugins.told(item), expected="rows that `datasets` can read") from item
        return item

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
        except BaseException as error:  # noqa: BLE001  not swallowed: `take` raises it
            self._put(error)

    def _put(self, item: Example | BaseException) -> bool:
        while not self._stopped.is_set():
            try:
                self._read.put(item, timeout=1.0)
            except queue.Full:
                continue
            return True
        return False


class StreamedTask:
    """Prompts of a stream; see `Task`. Evaluation asks the held-out rows.

    Args:
        name: of the source, for messages.
        part: names the orders of this source among those of a mixture.
    """

    def __init__(self, rows: RowStream, encoder: Encoder, seed: int, name: str, held: Sequence[Example], *, part: str = "") -> None:
        self._rows, self._encoder, self._seed, self._name, self._part = rows, encoder, seed, name, part
        self._held = held
        self._streams: dict[str, Numbered] = {}

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        """See `Task`."""
        if stream == EVALUATION:
            return self._encoder.prompt(self._held[group % len(self._held)], f"{self._name}, held-out row {group}")
        return self._encoder.prompt(self._numbered(stream)[group], f"{self._name}, {stream} {group}")

    def demonstration(self, index: int) -> Demonstration:
        """See `Task`."""
        return self._encoder.demonstration(self._numbered("demonstration")[index], f"{self._name}, demonstration {index}")

    def _numbered(self, stream: str) -> Numbered:
        if stream not in self._streams:
            digest = hashlib.blake2b(f"{self._seed} {stream}{self._part}".encode(), digest_size=4).digest()
            seed = int.from_bytes(digest)
            self._streams[stream] = Numbered(lambda: self._rows.epochs(seed), self._name)
        return self._streams[stream]
