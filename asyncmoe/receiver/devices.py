"""What ranks that exchange weights between GPUs say of their devices, and where they do not fit together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import torch

from asyncmoe.receiver.meeting import Device, Terms
from asyncmoe.reshard.nccl_transport import origin

_CURE = "install the same torch and nvidia-nccl in both environments (make setup GPU=1), or set sync.transport=ipc on one machine"


def described(device: torch.device, terms: Terms) -> Device | None:
    """This rank's; None of a CPU.

    Raises:
        UserError: weights travel by NCCL, and there is no usable one.
    """
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    found = origin() if terms.transport == "nccl" else None
    return Device(
        host=socket.gethostname(),
        device=str(device),
        card=f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})",
        torch=str(torch.__version__),
        nccl=version_words(found.version) if found else "",
        library=found.path if found else "",
    )


def version_words(code: int) -> str:
    """NCCL_VERSION_CODE as people write it (nccl.h, `NCCL_VERSION`): 23007 is 2.30.7."""
    thousand = 10000 if code >= 20900 else 1000
    return f"{code // thousand}.{code % thousand // 100}.{code % 100}"


def differences(devices: Mapping[int, Device | None], terms: Terms) -> list[str]:
    """Why weights cannot travel between these devices, each in one line; by rank of the meeting. NCCL refuses to talk to another version
    of itself; ranks that compute together need one kind of card and one torch."""
    known = {rank: device for rank, device in devices.items() if device is not None}
    wrong = _several("NCCL", {rank: one for rank, one in known.items() if one.nccl}, lambda d: d.nccl, terms, _CURE)
    trainer = terms.engines[0].first
    groups = {"the trainer": range(trainer)} | {e.name: range(e.first, e.first + e.tp) for e in terms.engines}
    for name, ranks in groups.items():
        mine = {rank: known[rank] for rank in ranks if rank in known}
        wrong += _several(f"the cards of {name}", mine, lambda d: d.card, terms, "place its ranks on one kind of card")
        wrong += _several(f"torch of {name}", mine, lambda d: d.torch, terms, "install one version on all its hosts")
    return wrong


def _several(what: str, devices: Mapping[int, Device], fact: Callable[[Device], str], terms: Terms, cure: str) -> list[str]:
    """One line where a fact is not the same of all."""
    found: dict[str, list[int]] = {}
    for rank in sorted(devices):
        found.setdefault(fact(devices[rank]), []).append(rank)
    if len(found) < 2:
        return []
    got = " and ".join(f"{value} ({_who(ranks, devices, terms)})" for value, ranks in found.items())
    return [f"{what}: got {got}, expected one; {cure}"]


def _who(ranks: list[int], devices: Mapping[int, Device], terms: Terms) -> str:
    """Ranks, by what they belong to, with their hosts and where their NCCL was found."""
    words = []
    first = terms.engines[0].first
    for name, low, high in [("trainer", 0, first), *((e.name, e.first, e.first + e.tp) for e in terms.engines)]:
        mine = [rank for rank in ranks if low <= rank < high]
        if not mine:
            continue
        numbers = [rank - low for rank in mine]
        together = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)) else None
        hosts = sorted({devices[rank].host for rank in mine})
        at = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
        library = f", {devices[mine[0]].library}" if devices[mine[0]].library else ""
        words.append(f"{name} rank{'s' * (len(mine) > 1)} {together or ', '.join(map(str, numbers))} on {at}{library}")
    return "; ".join(words)
