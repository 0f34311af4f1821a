"""Reads trajectories from the hashes of their groups in Redis: first what there is and how long it is, then the bytes.

So no answer is larger than what its writer has said in a head with a checksum, and memory is bounded before the server is asked for bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from asyncmoe.errors import DataError
from asyncmoe.journal.in_redis.server import RedisServer
from asyncmoe.payloads import packed, redis_scripts
from asyncmoe.payloads.packed import HEAD, MOST_HEAD, Asked, PackedHead
from asyncmoe.payloads.redis_scripts import field
from asyncmoe.payloads.store import Found
from asyncmoe.trajectory import Buffer

P = ParamSpec("P")
T = TypeVar("T")
BATCH_BYTES = 16 << 20
"""Of one request, or of the answers to one, unless a single trajectory is larger."""
_LOOKED_AT = 64
"""Trajectories whose heads are read at once."""


@dataclass(frozen=True)
class _Planned:
    asked: Asked
    head: PackedHead
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.head.pieces[name][0] for name in self.names)


def get(server: RedisServer, asked: Sequence[Asked]) -> Found:
    """Read trajectories. See `GroupStore.get`; errors as `RedisServer.call`."""
    found: list[list[Buffer] | DataError] = []
    for first in range(0, len(asked), _LOOKED_AT):
        for batch in packed.batches(_plan(server, asked[first : first + _LOOKED_AT]), _nbytes, BATCH_BYTES):
            found += _read(server, batch)
    return found


def _plan(server: RedisServer, asked: Sequence[Asked]) -> list[_Planned | DataError]:
    """Read the heads of trajectories, and check that what is wanted of each has the length that its head says."""
    looks = _look(server, [(one, ()) for one in asked])
    planned = [_or_error(_planned, one, head) for one, (head, _) in zip(asked, looks, strict=True)]
    whole = [(one.asked, one.names) for one in planned if isinstance(one, _Planned)]
    lengths = iter(_look(server, whole) if whole else ())
    return [one if isinstance(one, DataError) else _or_error(_sized, one, next(lengths)[1]) for one in planned]


def _look(server: RedisServer, asked: Sequence[tuple[Asked, Sequence[str]]]) -> Sequence[tuple[bytes | None, bytes]]:
    """Return of each trajectory its head, and the lengths of some pieces."""

    def request(redis: Any) -> Any:
        pipeline = redis.pipeline(transaction=False)
        for one, names in asked:
            fields = [field(one.key, name) for name in names]
            pipeline.eval(redis_scripts.LOOK, 1, one.stored, field(one.key, HEAD), MOST_HEAD, *fields)
        return pipeline.execute()

    return [(head, lengths) for head, lengths in server.call(request)]


def _planned(asked: Asked, data: bytes | None) -> _Planned:
    head = packed.opened(asked, data)
    return _Planned(asked, head, tuple(packed.wanted(asked, head)))


def _sized(planned: _Planned, lengths: bytes) -> _Planned:
    for name, length in zip(planned.names, map(int, lengths.split()), strict=True):
        if length != (expected := planned.head.pieces[name][0]):
            got = f"{length} bytes" if length else "nothing"
            raise DataError(f"{planned.asked.name}: {name}", got=got, expected=f"{expected} bytes")
    return planned


def _nbytes(planned: _Planned | DataError) -> int:
    return 0 if isinstance(planned, DataError) else planned.nbytes


def _read(server: RedisServer, batch: Sequence[_Planned | DataError]) -> Iterator[list[Buffer] | DataError]:
    there = [one for one in batch if isinstance(one, _Planned)]

    def request(redis: Any) -> Any:
        pipeline = redis.pipeline(transaction=False)
        for one in there:
            pipeline.hmget(one.asked.stored, [field(one.asked.key, name) for name in one.names])
        return pipeline.execute()

    answers = iter(server.call(request) if there else ())
    for one in batch:
        if isinstance(one, DataError):
            yield one
        else:
            pieces = dict(zip(one.names, next(answers), strict=True))
            yield _or_error(packed.unpacked, one.asked, one.head, pieces)


def _or_error(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | DataError:
    try:
        return make(*args, **kwargs)
    except DataError as error:
        return error
