"""Tools as users write them, good and bad."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from typing import Annotated, Literal

from pydantic import Field

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
        case "hang":
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "fork":
            child = os.fork()
            if not child:
                time.sleep(60)
            return str(child)
        case "process":
            return str(os.getpid())
    return argument.upper()


async def shout_later(argument: str) -> object:
    """Makes text louder."""
    await asyncio.sleep(60 if argument == "hang" else 0)
    return shout(argument)


def find_flight(
    origin: str,
    day: Annotated[int, Field(description="of the year")],
    copy: list[str] | None = None,
    cabin: Literal["economy", "first"] = "economy",
) -> str:
    """Finds a flight from an airport."""
    return f"{origin!r} {day + 1} {copy} {cabin}"


def untyped(anything):  # type: ignore[no-untyped-def]
    return anything


@functools.lru_cache
def cached(anything: str) -> str:
    return anything


def anything(*arguments: str) -> str:
    return ""


def mystery(module: type(os), number: int) -> str:  # type: ignore[valid-type]
    return ""
