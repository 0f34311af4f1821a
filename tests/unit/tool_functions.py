"""Tools as users write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Literal

from asyncmoe.rollout.episodes.tools.tool import ToolError

NUMBER = 3


def shout(argument: str) -> object:
    """Makes text louder."""
    print("a tool may print")
    match argument:
        case "raise":
            raise ValueError("no such thing")
        case "refuse":
            raise ToolError("tool_error", "do not ask")
        case "number":
            return 3
        case "flood":
            return "X" * 10**6
        case "exit":
            os._exit(3)
        case "hang":
            while True:
                time.sleep(0.01)
    return argument.upper()


async def shout_later(argument: str) -> object:
    """Makes text louder."""
    if argument == "hang":
        await asyncio.sleep(60)
    await asyncio.sleep(0)
    return shout(argument)


def process(argument: str) -> str:
    if argument == "hang":
        time.sleep(60)
    return str(os.getpid())


def warmer(degrees: float) -> str:
    return f"{degrees + 1}"


def find_flight(origin: str, day: int, copy: list[str] | None = None, cabin: Literal["economy", "first"] = "economy") -> str:
    """Finds a flight.

    Args:
        origin: the airport it leaves,
            by its code.
        day (int): of the year

    Returns:
        nothing: useful
    """
    return f"{origin!r} {day + 1} {copy} {cabin}"


async def find_flight_later(origin: str, day: int = 7) -> str:
    return f"{origin} {day}"


def anything(*arguments: str) -> str:
    return ""


def mystery(module: type(os), number: int) -> str:  # type: ignore[valid-type]
    return ""
