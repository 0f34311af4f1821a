"""Scorers as users write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from dataclasses import dataclass

import numpy as np

from asyncmoe.rollout.scoring import Sample


def length(prompt: str, response: str, answer: str) -> float:
    print("a scorer may print", prompt)
    return len(response) / 10


def process(prompt: str, response: str, answer: str) -> float:
    if response == "slow":
        time.sleep(0.2)
    return os.getpid()


async def slowly(prompt: str, response: str, answer: str) -> float:
    await asyncio.sleep(0.2)
    return float(response == answer)


_ANSWERS: dict[str, object] = {
    "nan": float("nan"),
    "infinite": float("-inf"),
    "text": "0.5",
    "nothing": None,
    "array": np.zeros(3),
    "huge": 10**400,
    "unknown key": {"reward": 1.0, "step": [1.0]},
    "steps of text": {"reward": 1.0, "steps": "1"},
    "another number of steps": {"reward": 1.0, "steps": [1.0, 1.0]},
    "step of nan": {"reward": 1.0, "steps": [float("nan")]},
    "metrics of text": {"reward": 1.0, "metrics": "0.5"},
    "metric without a name": {"reward": 1.0, "metrics": {"": 0.5}},
    "metric with a sentence": {"reward": 1.0, "metrics": {"is it right?": 0.5}},
    "metric of no text": {"reward": 1.0, "metrics": {1: 0.5}},
}


def bad(prompt: str, response: str, answer: str) -> object:
    match response:
        case "raise":
            raise ValueError("cannot score this")
        case "no connection":
            raise ConnectionRefusedError("the judge is not there")
        case "long complaint":
            raise ValueError("x" * 10_000_000)
        case "flood":
            return {"reward": 1.0, "steps": [0.123456789] * 200_000}
        case "exit":
            os._exit(3)
        case "hang":
            while True:
                time.sleep(0.01)
    return _ANSWERS.get(response, 1.0)


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


def named(prompt: str, response: str, answer: str) -> object:
    right, brief = response == answer, np.float32(1 / 4)
    return {"reward": right + brief, "metrics": {"right": right, "brief": brief, "tries": np.int64(len(response))}}


async def named_coroutine(prompt: str, response: str, answer: str) -> object:
    return named(prompt, response, answer)


@dataclass
class Answered:
    reward: float
    metrics: dict[str, float]


class NamedByClass:
    def score(self, sample: Sample) -> Answered:
        return Answered(0.5, {"length": len(sample.response)})


def steps_of_function(prompt: str, response: str, answer: str) -> object:
    return {"reward": np.float64(1.0), "steps": np.array([0.25, 0.5])}


_asked: list[str] = []


def second_time(prompt: str, response: str, answer: str) -> float:
    _asked.append(response)
    if len(_asked) == 1:
        raise ValueError("not yet")
    return 1.0


@dataclass
class Judged:
    reward: float
    steps: list[float]


class Plain:
    """Scores the two steps of the one conversation that `test_scoring` has."""

    def __init__(self, first: float, diary: str = os.devnull) -> None:
        self.first, self.diary = first, diary
        self.note("made")

    def note(self, what: str) -> None:
        with open(self.diary, "a") as file:
            file.write(what + "\n")

    def score(self, sample: Sample) -> Judged:
        self.note("score")
        whole = (sample.prompt, sample.response, sample.answer, list(sample.tokens), list(sample.sampled), sample.agent)
        assert whole == ("p", "cd", "x", [97, 98, 99, 97, 98], [False, True, True, False, True], "solver")
        return Judged(1.0, [self.first, 0.5])

    def close(self) -> None:
        self.note("closed")


class Coroutine(Plain):
    async def score(self, sample: Sample) -> Judged:  # type: ignore[override]
        return super().score(sample)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class NoScore:
    pass


not_a_function = 3


def forks_and_reads(prompt: str, response: str, answer: str) -> float:
    if os.fork() == 0:
        raise SystemExit(0)
    return 0.5 if subprocess.run(["cat"], capture_output=True, check=True, timeout=4).stdout == b"" else 0.0
