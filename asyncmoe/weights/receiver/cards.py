"""Ranks' reports about their GPUs for the rendezvous, and whether these GPUs can exchange weights."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch

from asyncmoe.config.transports import TRANSPORTS
from asyncmoe.errors import OutOfDeviceMemory, gibibytes
from asyncmoe.reshard.nccl import origin
from asyncmoe.rpc import nics
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import Card, Terms

_SAME_NCCL = "install the same torch and nvidia-nccl in both environments, or set sync.transport=ipc on one machine"
_SAME_NETWORK = "see what `asyncmoe doctor` says of InfiniBand on the host with TCP, or export NCCL_IB_DISABLE=1 on all hosts"
_REACH = "set sync.transport=nccl, or place them on GPUs that reach each other (nvidia-smi topo -p2p r)"


def card_of(device: torch.device, terms: Terms, wanted: int = 0, copy: int = 0) -> Card | None:
    """Describe a rank's GPU; return None for a CPU. Call it in a thread of that device.

    Args:
        wanted, copy: see `Card`.

    Raises:
        UserError: the transport is NCCL and no usable NCCL was found.
    """
    if device.type != "cuda":
        return None
    found = origin() if TRANSPORTS[terms.transport].nccl else None
    free, total = torch.cuda.mem_get_info(device)
    # Torch's cached memory counts as free, because torch frees it before it runs out of memory; fragments may still be too small.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    uuids = {index: str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())}
    unreachable = {uuid for index, uuid in uuids.items() if index != device.index and not torch.cuda.can_device_access_peer(device, index)}
    return Card(
        host=socket.gethostname(),
        device=str(device),
        uuid=uuids[device.index],
        free=free + kept,
        total=total,
        wanted=wanted,
        nccl=found.words if found else "",
        library=found.path if found else "",
        unreachable=tuple(sorted(unreachable)),
        copy=copy,
        network=nics.here() if found else "",
    )


def reach_each_other() -> bool:
    """Return whether all GPUs visible to this process, if any, can read each other's memory."""
    count = range(torch.cuda.device_count())
    return all(torch.cuda.can_device_access_peer(one, other) for one in count for other in count if one != other)


def in_place(cards: Mapping[int, Card]) -> bool:
    """Return whether engines receive into their parameters, because some GPU has no room for staging memory.

    Args:
        cards: as for `unfit`.
    """
    return any(card.wanted + card.copy > card.free for card in cards.values())


def unfit(cards: Mapping[int, Card], terms: Terms) -> list[str]:
    """Return the reasons why weights cannot be sent between these GPUs, each in one line.

    Args:
        cards: by rank in the meeting, for the ranks with a GPU.
    """
    names, each = protocol.names(terms), sorted(cards.items())
    versions = {card.nccl: f"{card.nccl} ({names[rank]} on {card.host}, {card.library})" for rank, card in each if card.nccl}
    networks = {card.network: f"{card.network} ({names[rank]} on {card.host})" for rank, card in each if card.network}
    short = [_shortage(names[rank], card) for rank, card in each if card.wanted > card.free]
    apart = _unreachable(cards, terms) if TRANSPORTS[terms.transport].reads_sender else []
    nccl = _several("NCCL", versions, f"one version; {_SAME_NCCL}") + _several("NCCL's network", networks, f"one; {_SAME_NETWORK}")
    return [*nccl, *short, *apart]


def _several(what: str, found: Mapping[str, str], expected: str) -> list[str]:
    """Return one line if ranks differ, which NCCL refuses: in its version, or in connecting over InfiniBand or TCP (2.30:
    src/transport/net_ib/connect.cc, net_socket.cc). `found`: names one rank of each value."""
    return [f"{what}: got {' and '.join(found.values())}, expected {expected}"] if len(found) > 1 else []


def _shortage(whom: str, card: Card) -> str:
    """Return the line for a GPU that has too little free memory to receive in place."""
    got, expected = f"{gibibytes(card.free)} free of {gibibytes(card.total)}", gibibytes(card.wanted)
    return f"{whom} on {card.host}, {card.device}: memory to receive weights in: got {got}, expected {expected}; {OutOfDeviceMemory.HINT}"


def _unreachable(cards: Mapping[int, Card], terms: Terms) -> list[str]:
    """Return a line for every engine GPU that cannot read the memory of a trainer GPU on its host, although the transport requires it."""
    whom, trainer = protocol.names(terms), terms.engines[0].first
    return [
        f"sync.transport {terms.transport} on {reader.host}: got no peer access from {whom[rank]}'s {reader.device} to {whom[other]}'s "
        f"{writer.device}, expected it between all GPUs of the trainer and the engines; {_REACH}"
        for rank, reader in sorted(cards.items())
        for other, writer in sorted(cards.items())
        if other < trainer <= rank and writer.host == reader.host and writer.uuid in reader.unreachable
    ]
