"""A rank's end of a channel in a meeting, and the opening of transports through the meeting's store."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from asyncmoe.config.transports import TRANSPORTS, TransportName
from asyncmoe.reshard import SharedTransport, Transport
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.nccl_transport import NcclTransport
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.reshard.transport import TransportEnd
from asyncmoe.weights.protocol import Terms
from asyncmoe.weights.receiver.control_store import Store

_GROUP_S = 30.0
"""Timeout for making a process group once all ranks have arrived; until then torch does not detect a dead rank."""


@dataclass(frozen=True, kw_only=True)
class ChannelEnd(TransportEnd):
    """A rank's end of channel `epoch`.

    Attributes:
        store: the meeting's store, for addresses: a transport sets its own `Key`s there, with the epoch in their names.
        unique_id: unique ID of the NCCL communicator; empty unless the transport is NCCL.
    """

    store: Store
    epoch: int
    terms: Terms
    unique_id: bytes


def opener(name: TransportName) -> Callable[[ChannelEnd], Transport | SharedTransport]:
    """Return the function that opens a transport. All ranks of a channel call it."""
    module, _, function = TRANSPORTS[name].opened_by.partition(":")
    return cast("Callable[[ChannelEnd], Transport | SharedTransport]", getattr(importlib.import_module(module), function))


def open_gloo(end: ChannelEnd) -> TorchTransport:
    """Make a gloo process group of all ranks.

    Raises:
        WaitTimeout, WeightSyncError: as `Store.connect`.
    """
    return TorchTransport(end.store.connect(end.world, end.epoch, min(_GROUP_S, end.timeout_s)))


class _NcclOfChannel(NcclTransport):
    def end(self, idle: bool) -> None:
        super().end(False)  # other ranks may be gone, and all have received what they need when a channel is closed


def open_nccl(end: ChannelEnd) -> NcclTransport:
    """Make an NCCL communicator of all ranks.

    Raises:
        UserError, TransferError, WaitTimeout: as `NcclTransport`.
    """
    assert end.device is not None  # as `transport_for` sees to
    return _NcclOfChannel(
        end.rank,
        end.world,
        end.unique_id,
        end.device,
        stream=end.stream,
        timeout_s=end.timeout_s,
        max_ctas=end.terms.max_ctas,
        gpu=Gpu(end.device, end.relieve),
        watch=end.watch,
    )
