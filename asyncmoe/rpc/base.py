"""The base of all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class name."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A number in a request: nonnegative, and exact in every encoding."""
Wait = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
"""Longest wait for the reply to a request, in seconds; must be finite: infinity or NaN would stop every timer of asyncio's loop."""
