"""A rank's failure reports: cause, place and hint."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

import torch

from asyncmoe.errors import AsyncmoeError, OutOfDeviceMemory, ReportedFailure, TransferError, WaitTimeout, first_line
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import ELSEWHERE, Terms

_OF_A_PEER = ("is gone", "remote process exited or there was a network error", ELSEWHERE)
"""Phrases in reports of a rank whose peer has ended or failed: from transports, from NCCL (ncclRemoteError), and `ELSEWHERE`."""


def said(error: Exception, terms: Terms | None, rank: int, device: torch.device) -> str:
    """Describe an error in one line, with its rank, host and device; a `ReportedFailure` names them already.

    The text of `in_words` comes first, because `cause` matches the beginning of a report.
    """
    if isinstance(error, ReportedFailure):
        return str(error)
    return f"{in_one_line(error, terms)} ({f'rank {rank}' if terms is None else protocol.names(terms)[rank]} on {where(device)})"


def where(device: torch.device) -> str:
    """Return "host, device" for a device of this host."""
    return f"{socket.gethostname()}, {device}"


def in_one_line(error: Exception, terms: Terms | None = None) -> str:
    """Describe an error in one line, without its place; if memory ran out, add the hint of `OutOfDeviceMemory`.

    Args:
        terms: the meeting's terms, once known: ranks are then given their names (`protocol.names`).
    """
    if isinstance(error, AsyncmoeError):
        return str(error) if terms is None else in_words(error, terms)
    words = first_line(error)
    if isinstance(error, MemoryError | OutOfDeviceMemory | torch.OutOfMemoryError):
        return f"out of memory: {words or type(error).__name__}; {OutOfDeviceMemory.HINT}"
    return f"{type(error).__name__}: {words}"


def cause(failures: Mapping[str, str]) -> str:
    """Return the root cause among the failures of several ranks.

    Args:
        failures: maps the name of each reporting rank to its report, which begins with the text of `in_words`.
    """

    def is_consequence(text: str) -> int:
        waited = re.match(r"waited [\d.]+ s for (.*?):", text)
        if waited:
            return 3 if any(whom in failures for whom in waited[1].split(", ")) else 1
        return 2 if any(words in text for words in _OF_A_PEER) else 0

    return min(failures.values(), key=is_consequence)


def in_words(error: AsyncmoeError, terms: Terms) -> str:
    """Describe a transfer error, with rank numbers replaced by the ranks' names (`protocol.names`)."""
    who = protocol.names(terms)

    def called(text: str) -> str:
        return re.sub(r"\branks? (\d+(?:, \d+)*)\b", lambda found: ", ".join(who[int(rank)] for rank in found[1].split(", ")), text)

    if isinstance(error, TransferError):
        return f"from {who[error.source]} to {who[error.destination]}: {called(error.what)}"
    if isinstance(error, WaitTimeout) and re.fullmatch(r"ranks? (\d+(?:, \d+)*)", error.whom):
        return str(WaitTimeout(called(error.whom), error.what, error.seconds))
    return str(error)
