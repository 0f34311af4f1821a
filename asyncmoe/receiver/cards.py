"""Where the cards of ranks that exchange weights do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncmoe.errors import OutOfDeviceMemory, gibibytes
from asyncmoe.receiver import protocol
from asyncmoe.receiver.protocol import Card, Terms

_SAME_NCCL = "install the same torch and nvidia-nccl in both environments (make setup GPU=1), or set sync.transport=ipc on one machine"
_REACH = "set sync.transport=nccl, or place them on GPUs that reach each other (nvidia-smi topo -p2p r)"


def unfit(cards: Mapping[int, Card], terms: Terms) -> list[str]:
    """Why weights cannot travel between these cards, each in one line.

    Args:
        cards: of the ranks that have one, by rank of the meeting.
    """
    short = [line for rank, card in sorted(cards.items()) for line in _shortage(protocol.names(terms)[rank], card)]
    return _differences(cards, terms) + short + (_unreachable(cards, terms) if terms.transport == "ipc" else [])


def _differences(cards: Mapping[int, Card], terms: Terms) -> list[str]:
    """NCCL refuses to talk to another version of itself; ranks that compute together need one kind of card and one torch."""
    wrong = _several("NCCL", {rank: card for rank, card in cards.items() if card.nccl}, lambda card: card.nccl, terms, _SAME_NCCL)
    trainer = terms.engines[0].first
    groups = {"the trainer": range(trainer)} | {e.name: range(e.first, e.first + e.tp) for e in terms.engines}
    for name, ranks in groups.items():
        mine = {rank: cards[rank] for rank in ranks if rank in cards}
        wrong += _several(f"the cards of {name}", mine, lambda card: card.model, terms, "place its ranks on one kind of card")
        wrong += _several(f"torch of {name}", mine, lambda card: card.torch, terms, "install one version on all its hosts")
    return wrong


def _shortage(whom: str, card: Card) -> list[str]:
    """What keeps a card from taking what is going to be allocated there."""
    if card.wanted <= card.free:
        return []
    got, expected = f"{gibibytes(card.free)} free of {gibibytes(card.total)}", gibibytes(card.wanted)
    what = f"{whom} on {card.host}, {card.device}: memory to receive weights in"
    return [f"{what}: got {got}, expected {expected}; {OutOfDeviceMemory.CURE}"]


def _unreachable(cards: Mapping[int, Card], terms: Terms) -> list[str]:
    """Pairs of an engine's and a trainer's card of which the former cannot read the memory of the latter, as sync.transport=ipc has to."""
    whom, trainer = protocol.names(terms), terms.engines[0].first
    return [
        f"sync.transport ipc on {reader.host}: got no peer access from {whom[rank]}'s {reader.device} to {whom[other]}'s "
        f"{writer.device}, expected it between all GPUs of the trainer and the engines; {_REACH}"
        for rank, reader in sorted(cards.items())
        for other, writer in sorted(cards.items())
        if other < trainer <= rank and writer.host == reader.host and writer.uuid in reader.unreachable
    ]


def _several(what: str, cards: Mapping[int, Card], fact: Callable[[Card], str], terms: Terms, cure: str) -> list[str]:
    """One line where a fact is not the same of all."""
    found: dict[str, list[int]] = {}
    for rank in sorted(cards):
        found.setdefault(fact(cards[rank]), []).append(rank)
    if len(found) < 2:
        return []
    got = " and ".join(f"{value} ({_who(ranks, cards, terms)})" for value, ranks in found.items())
    return [f"{what}: got {got}, expected one; {cure}"]


def _who(ranks: list[int], cards: Mapping[int, Card], terms: Terms) -> str:
    """Ranks, by what they belong to, with their hosts and where their NCCL was found."""
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
