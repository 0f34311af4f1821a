"""Compatibility checks between the GPUs of ranks that exchange weights."""

from __future__ import annotations

from collections.abc import Mapping

from asyncmoe.config.transports import TRANSPORTS
from asyncmoe.errors import OutOfDeviceMemory, gibibytes
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import Card, Terms

_SAME_NCCL = "install the same torch and nvidia-nccl in both environments, or set sync.transport=ipc on one machine"
_REACH = "set sync.transport=nccl, or place them on GPUs that reach each other (nvidia-smi topo -p2p r)"


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
    names = protocol.names(terms)
    short = [_shortage(names[rank], card) for rank, card in sorted(cards.items()) if card.wanted > card.free]
    return _versions(cards, names) + short + (_unreachable(cards, terms) if TRANSPORTS[terms.transport].reads_sender else [])


def _versions(cards: Mapping[int, Card], names: Mapping[int, str]) -> list[str]:
    """Return one line if ranks have different versions of NCCL, which refuses peers of another; it names one rank of each."""
    found = {card.nccl: f"{card.nccl} ({names[rank]} on {card.host}, {card.library})" for rank, card in sorted(cards.items()) if card.nccl}
    return [f"NCCL: got {' and '.join(found.values())}, expected one; {_SAME_NCCL}"] if len(found) > 1 else []


def _shortage(whom: str, card: Card) -> str:
    """Return the line of a GPU that has too little free memory for receiving in place."""
    got, expected = f"{gibibytes(card.free)} free of {gibibytes(card.total)}", gibibytes(card.wanted)
    return f"{whom} on {card.host}, {card.device}: memory to receive weights in: got {got}, expected {expected}; {OutOfDeviceMemory.HINT}"


def _unreachable(cards: Mapping[int, Card], terms: Terms) -> list[str]:
    """Return a line for every engine GPU that cannot read the memory of a trainer GPU on its host, as the transport requires."""
    whom, trainer = protocol.names(terms), terms.engines[0].first
    return [
        f"sync.transport {terms.transport} on {reader.host}: got no peer access from {whom[rank]}'s {reader.device} to {whom[other]}'s "
        f"{writer.device}, expected it between all GPUs of the trainer and the engines; {_REACH}"
        for rank, reader in sorted(cards.items())
        for other, writer in sorted(cards.items())
        if other < trainer <= rank and writer.host == reader.host and writer.uuid in reader.unreachable
    ]
