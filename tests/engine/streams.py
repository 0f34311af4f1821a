"""Streams of a device that is not there: torch.cpu's classes, which do nothing, with the order that CUDA's would have.

Every stream counts what is enqueued on it, and knows up to which count of every other stream it waits. The host knows what it has waited
for, and what is enqueued by it comes after that. Nothing is run later than it is enqueued: the order is kept account of, not acted out.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

Seen = dict["Stream", int]
_host: Seen = {}


class Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.seen: Seen = {}
        self.count = 0

    def wait_stream(self, stream: Stream) -> None:
        _merge(self.seen, stream.now())

    def wait_event(self, event: Event) -> None:
        _merge(self.seen, event.seen)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _merge(_host, self.now())

    def now(self) -> Seen:
        return {**self.seen, self: self.count}


class Event:
    def __init__(self, *_: object, **__: object) -> None:
        self.seen: Seen = {}

    def record(self, stream: Stream | None = None) -> None:
        self.seen = (stream or current_stream()).now()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _merge(_host, self.seen)

    def query(self) -> bool:
        self.synchronize()
        return True


_current = [Stream()]


class StreamContext(AbstractContextManager[None]):
    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _current.append(self.stream or current_stream())

    def __exit__(self, *_: object) -> None:
        _current.pop()


@dataclass(frozen=True)
class Enqueued:
    """A kernel: the `count`th thing on `stream`."""

    stream: Stream
    count: int

    def before(self) -> bool:
        """Whether it has ended before what is enqueued on the current stream now begins."""
        stream = current_stream()
        return stream is self.stream or max(stream.seen.get(self.stream, 0), _host.get(self.stream, 0)) >= self.count


def current_stream(device: object = None) -> Stream:
    return _current[-1]


def enqueue() -> Enqueued:
    """Something on the current stream."""
    stream = current_stream()
    _merge(stream.seen, _host)
    stream.count += 1
    return Enqueued(stream, stream.count)


def install() -> None:
    """Give torch.cpu these streams. Before anything takes one."""
    for name, value in {"Stream": Stream, "Event": Event, "StreamContext": StreamContext, "stream": StreamContext}.items():
        setattr(torch.cpu, name, value)
    torch.cpu.current_stream = current_stream


def _merge(into: Seen, other: Seen) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)
