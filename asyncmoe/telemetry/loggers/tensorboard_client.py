"""TensorBoard's files, without torch: importing it takes seconds, and the supervisor has no other use for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncmoe.telemetry.clock import unix
from asyncmoe.telemetry.loggers.points import LoggedPoint


class TensorBoard:
    """A folder of TensorBoard files; implements `LoggerClient`. Each start of the run writes a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> tuple[str, str]:
        """See `LoggerClient`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        now = unix()
        self._writer = RecordWriter((self._folder / f"events.out.tfevents.{now:.6f}").open("xb"))
        self._writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        return "tensorboard", ""

    def log(self, point: LoggedPoint) -> None:
        """See `LoggerClient`. TensorBoard groups values by the part of their names before the first slash."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        named = {name if name.startswith(("rollout/", "evaluation/")) else f"step/{name}": value for name, value in point.values.items()}
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in named.items()])
        self._writer.write(Event(step=point.step, wall_time=point.time, summary=summary).SerializeToString())
        self._writer.flush()

    def close(self, complete: bool) -> None:
        """See `LoggerClient`."""
        self._writer.close()
