"""What a rank says when something fails: the cause, where it was, and the way out."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

import torch

from asyncmoe.errors import AsyncmoeError, OutOfDeviceMemory, TransferError, WaitTimeout
from asyncmoe.receiver import protocol
from asyncmoe.receiver.protocol import ELSEWHERE, Terms

_OF_A_PEER = ("is gone", "remote process exited or there was a network error", ELSEWHERE)
"""Words for a peer that has ended or failed: the first of transports, the second of NCCL (ncclRemoteError)."""


def said(error: Exception, terms: Terms, rank: int, device: torch.device) -> str:
    """An error in one line, of whatever type, with the rank that met it, its host and its device.

    The words of `in_words` come first: `cause` looks at how a report begins.
    """
    return f"{in_one_line(error, terms)} ({protocol.names(terms)[rank]} on {where(device)})"


def where(device: torch.device) -> str:
    """This host, and a device of it."""
    return f"{socket.gethostname()}, {device}"


def in_one_line(error: Exception, terms: Terms | None = None) -> str:
    """An error without where it was met; of memory that ran out with the way out.

    Args:
        terms: of the meeting, once there are any: ranks are then called by what they are.
    """
    if isinstance(error, AsyncmoeError):
        return str(error) if terms is None else in_words(error, terms)
    words = (str(error).splitlines() or [""])[0]
    if is_out_of_memory(error):
        return f"out of memory: {words or type(error).__name__}; {OutOfDeviceMemory.CURE}"
    return f"{type(error).__name__}: {words}"


def is_out_of_memory(error: Exception) -> bool:
    """Of a device or of the host."""
    return isinstance(error, MemoryError | OutOfDeviceMemory | torch.OutOfMemoryError)


def cause(failures: Mapping[str, str]) -> str:
    """The root cause among the failures of several ranks.

    Args:
        failures: who reported it -> the report, as `in_words` makes it.
    """

    def is_consequence(text: str) -> int:
        waited = re.match(r"waited [\d.]+ s for (.*?):", text)
        if waited:
            return 3 if any(whom in failures for whom in waited[1].split(", ")) else 1
        return 2 if any(words in text for words in _OF_A_PEER) else 0

    return min(failures.values(), key=is_consequence)


def in_words(error: AsyncmoeError, terms: Terms) -> str:
    """An error of the transfer, with its ranks called by what they are."""
    who = protocol.names(terms)

    def called(text: str) -> str:
        return re.sub(r"\branks? (\d+(?:, \d+)*)\b", lambda found: ", ".join(who[int(rank)] for rank in found[1].split(", ")), text)

    if isinstance(error, TransferError):
        return f"from {who[error.source]} to {who[error.destination]}: {called(error.what)}"
    if isinstance(error, WaitTimeout) and re.fullmatch(r"ranks? (\d+(?:, \d+)*)", error.whom):
        return str(WaitTimeout(called(error.whom), error.what, error.seconds))
    return str(error)
