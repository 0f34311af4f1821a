"""A rank's end of a channel in a meeting, and the transports whose ranks find each other through the meeting's store."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from asyncmoe import plugins
from asyncmoe.config.transports import TRANSPORTS, TransportName, wrong_entry
from asyncmoe.errors import ConfigError, InvariantBroken, an
from asyncmoe.reshard import SharedTransport, Transport
from asyncmoe.reshard.nccl_transport import RoutedTransport
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.reshard.transport import TransportEnd
from asyncmoe.weights.protocol import Agreed, Terms
from asyncmoe.weights.receiver.communicators import Communicators
from asyncmoe.weights.receiver.control_store import Store

log = logging.getLogger(__name__)
_GROUP_S = 30.0
"""Timeout of making a process group once all ranks have arrived, during which torch does not detect a dead rank."""


@dataclass(frozen=True, kw_only=True)
class ChannelEnd(TransportEnd):
    """A rank's end of channel `epoch`.

    Attributes:
        store: the meeting's, for addresses: a transport sets `Key`s of its own there, whose names contain the epoch.
        communicators: NCCL communicators of this process's GPU; None without a GPU.
        agreed: the communicators to use, by engine; empty unless the transport is NCCL.
    """

    store: Store
    epoch: int
    terms: Terms
    communicators: Communicators | None
    agreed: Mapping[str, Agreed]


def open_transport(end: ChannelEnd) -> Transport | SharedTransport:
    """Open the transport that the terms name. All ranks of the channel call it.

    Raises:
        ConfigError: the entry of the transport is wrong.
        Exception: whatever its `opened_by` raises.
    """
    name = end.terms.transport
    opened = opener(name)(end)
    if not isinstance(opened, Transport | SharedTransport):
        expected = "a Transport or SharedTransport with all its members (asyncmoe/reshard/transport.py)"
        raise ConfigError("sync.transport", got=f"{an(type(opened).__name__)} from {TRANSPORTS[name].opened_by}", expected=expected)
    return opened


def opener(name: TransportName) -> Callable[[ChannelEnd], object]:
    """Return the function that opens a transport.

    Raises:
        ConfigError: its `opened_by` cannot be imported, or is no function.
    """
    target = TRANSPORTS[name].opened_by
    module, _, function = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        log.exception("transport %s", name)  # a rank that only receives the message has no line of it
        raise wrong_entry(name, plugins.told(error)) from error
    if not callable(found):
        raise wrong_entry(name, f"it is {an(type(found).__name__)}")
    return cast("Callable[[ChannelEnd], object]", found)


def open_gloo(end: ChannelEnd) -> TorchTransport:
    """Make a gloo process group of all ranks.

    Raises:
        WaitTimeout, WeightSyncError: as `Store.connect`.
    """
    return TorchTransport(end.store.connect(end.world, end.epoch, min(_GROUP_S, end.timeout_s)))


def open_nccl(end: ChannelEnd) -> RoutedTransport:
    """Make the communicators that the ranks agreed on, or take those held.

    Raises:
        InvariantBroken: the end is not on a GPU.
        UserError, TransferError, WaitTimeout: as `Communicators.transport`.
    """
    if end.communicators is None:
        raise InvariantBroken("sync.transport nccl was chosen for weights in host memory")
    return end.communicators.transport(end.rank, end.terms, end.agreed, end.stream, end.timeout_s, end.watch)
