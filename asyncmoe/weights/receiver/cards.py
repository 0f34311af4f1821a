"""Compatibility checks between the GPUs of ranks that exchange weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    short = [line for rank, card in sorted(cards.items()) for line in _shortage(protocol.names(terms)[rank], card)]
    return _differences(cards, terms) + short + (_unreachable(cards, terms) if TRANSPORTS[terms.transport].reads_sender else [])


def _differences(cards: Mapping[int, Card], terms: Terms) -> list[str]:
    """NCCL refuses peers of another version; ranks that compute together (the trainer's, an engine's) need one GPU model and torch."""
    wrong = _several("NCCL", {rank: card for rank, card in cards.items() if card.nccl}, lambda card: card.nccl, terms, _SAME_NCCL)
    trainer = terms.engines[0].first
    groups = {"the trainer": range(trainer)} | {e.name: range(e.first, e.first + e.tp) for e in terms.engines}
    for name, ranks in groups.items():
        mine = {rank: cards[rank] for rank in ranks if rank in cards}
        wrong += _several(f"the cards of {name}", mine, lambda card: card.model, terms, "place its ranks on one kind of card")
        wrong += _several(f"torch of {name}", mine, lambda card: card.torch, terms, "install one version on all its hosts")
    return wrong


def _shortage(whom: str, card: Card) -> list[str]:
    """Return a line if a GPU has too little free memory for receiving in place."""
    if card.wanted <= card.free:
        return []
    got, expected = f"{gibibytes(card.free)} free of {gibibytes(card.total)}", gibibytes(card.wanted)
    what = f"{whom} on {card.host}, {card.device}: memory to receive weights in"
    return [f"{what}: got {got}, expected {expected}; {OutOfDeviceMemory.HINT}"]


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


def _several(what: str, cards: Mapping[int, Card], fact: Callable[[Card], str], terms: Terms, hint: str) -> list[str]:
    """Return one line if `fact` differs between GPUs."""
    found: dict[str, list[int]] = {}
    for rank in sorted(cards):
        found.setdefault(fact(cards[rank]), []).append(rank)
    if len(found) < 2:
        return []
    got = " and ".join(f"{value} ({_who(ranks, cards, terms)})" for value, ranks in found.items())
    return [f"{what}: got {got}, expected one; {hint}"]


def _who(ranks: list[int], cards: Mapping[int, Card], terms: Terms) -> str:
    """Describe ranks: trainer or engine, numbers, hosts, and the NCCL library of the first."""
    words = []
    first = terms.engines[0].first
    for name, low, high in [("trainer", 0, first), *((e.name, e.first, e.first + e.tp) for e in terms.engines)]:
        mine = [rank for rank in ranks if low <= rank < high]
        if not mine:
            continue
        numbers = [rank - low for rank in mine]
        together = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)) else None
        hosts = sorted({cards[rank].host for rank in mine})
        at = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
        library = f", {cards[mine[0]].library}" if cards[mine[0]].library else ""
        words.append(f"{name} rank{'s' * (len(mine) > 1)} {together or ', '.join(map(str, numbers))} on {at}{library}")
    return "; ".join(words)
