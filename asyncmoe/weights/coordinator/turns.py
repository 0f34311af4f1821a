"""Checks that a sender's request is in turn. Every rank has the run's key, so a faulty rank could otherwise mislead the controller."""

from __future__ import annotations

from asyncmoe.errors import ProtocolError
from asyncmoe.rpc.base import Message
from asyncmoe.rpc.messages import WeightsBegin, WeightsFiles, WeightsStage


def check(request: Message, serving: int, trained: int | None) -> None:
    """Refuse a request that opens a version the trainer cannot have made, or that comes before the trainer is known.

    Args:
        serving: version that the engines serve.
        trained: optimizer steps taken by the trainer, equal to its newest version; None: it has sent no `Hello`.

    Raises:
        ProtocolError: the request is out of turn.
    """
    if not isinstance(request, WeightsStage | WeightsBegin | WeightsFiles):
        return
    name = type(request).__name__
    if trained is None:
        raise ProtocolError(f"{name}: sent before any Hello, expected Hello first")
    if not serving <= request.version <= trained:
        raise ProtocolError(
            f"{name}: got version {request.version}, expected {serving} (served by engines) to {trained} (the trainer's newest)"
        )
