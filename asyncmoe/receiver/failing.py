"""What a rank says when something fails: the cause, where it was, and the way out."""

from __future__ import annotations

import socket

import torch

from asyncmoe.errors import AsyncmoeError, OutOfDeviceMemory
from asyncmoe.receiver import control_store
from asyncmoe.receiver.control_store import Terms


def said(error: Exception, terms: Terms, rank: int, device: torch.device) -> str:
    """An error in one line, of whatever type, with the rank that met it, its host and its device.

    The words of `meeting.in_words` come first, so that `meeting.cause` finds what they begin with.
    """
    return f"{in_one_line(error, terms)} ({control_store.names(terms)[rank]} on {where(device)})"


def where(device: torch.device) -> str:
    """This host, and a device of it."""
    return f"{socket.gethostname()}, {device}"


def in_one_line(error: Exception, terms: Terms | None = None) -> str:
    """An error without where it was met; of memory that ran out with the way out.

    Args:
        terms: of the meeting, once there are any: ranks are then called by what they are.
    """
    if isinstance(error, AsyncmoeError):
        return str(error) if terms is None else control_store.in_words(error, terms)
    words = (str(error).splitlines() or [""])[0]
    if is_out_of_memory(error):
        return f"out of memory: {words or type(error).__name__}; {OutOfDeviceMemory.CURE}"
    return f"{type(error).__name__}: {words}"


def is_out_of_memory(error: Exception) -> bool:
    """Of a device or of the host."""
    return isinstance(error, MemoryError | OutOfDeviceMemory | torch.OutOfMemoryError)
