"""Scorers as users write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np


def length(prompt: str, response: str, answer: str) -> float:
    print("a scorer may print", prompt)
    return len(response) / 10


def numpy_scalar(prompt: str, response: str, answer: str) -> float:
    return np.float32(0.5)  # type: ignore[return-value]


def process(prompt: str, response: str, answer: str) -> float:
    if response == "slow":
        time.sleep(0.2)
    return os.getpid()


async def slowly(prompt: str, response: str, answer: str) -> float:
    await asyncio.sleep(0.2)
    return float(response == answer)


def bad(prompt: str, response: str, answer: str) -> object:
    match response:
        case "raise":
            raise ValueError("cannot score this")
        case "nan":
            return float("nan")
        case "infinite":
            return float("-inf")
        case "text":
            return "0.5"
        case "nothing":
            return None
        case "exit":
            os._exit(3)
        case "hang":
            while True:
                time.sleep(0.01)
    return 1.0


async def bad_coroutine(prompt: str, response: str, answer: str) -> object:
    if response == "hang":
        await asyncio.sleep(60)
    if response == "its own timeout":
        raise TimeoutError("the judge is busy")
    return bad(prompt, response, answer)


def moody(prompt: str, response: str, answer: str) -> float:
    if int(answer) % 2:
        raise ValueError("odd answers are not scored")
    return float(response == answer)


not_a_function = 3
