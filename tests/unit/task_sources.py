"""A user's own tasks, good and bad, for test_tasks_own.py."""

from __future__ import annotations

import random as globally
from collections.abc import Sequence
from random import Random

import numpy as np

from asyncmoe.rollout.tasks import Example

CITIES = ("France", "Paris"), ("Japan", "Tokyo"), ("Peru", "Lima"), ("Chad", "N'Djamena"), ("Fiji", "Suva"), ("Oman", "Muscat")


class Capitals:
    """A finite task: the capitals of some countries, with the continent as a column."""

    def __init__(self, form: str = "text") -> None:
        self.form = form

    def __len__(self) -> int:
        return len(CITIES)

    def __getitem__(self, index: int) -> Example:
        country, capital = CITIES[index]
        question = f"The capital of {country}?"
        prompt: str | Sequence[dict[str, str]] = question
        if self.form == "messages":
            prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": question}]
        return Example(prompt, capital, {"index": index, "letters": list(capital[:2])})


class Doubles:
    """An endless task, with prompts of token ids."""

    def draw(self, random: Random) -> Example:
        number = random.randrange(100)
        return Example([10 + number % 7, 11, 12], str(2 * number), {"number": number})


class Breaks:
    """Works when it is tried; later it raises or returns nonsense, as told."""

    def __init__(self, how: str = "raises") -> None:
        self.how, self.asked = how, 0

    def draw(self, random: Random) -> Example:
        self.asked += 1
        if self.asked <= 2:
            return Example("first", "1")
        if self.how == "raises":
            return Example("x", {}["missing"])
        return "a text"  # type: ignore[return-value]


class Lottery:
    """Draws from the generator of the whole process."""

    def draw(self, random: Random) -> Example:
        return Example(f"{globally.random()}", "1")


class Empty(Capitals):
    def __len__(self) -> int:
        return 0


class Neither:
    pass


class Wrong(Capitals):
    """Its last example is the one that is wrong."""

    def __getitem__(self, index: int) -> Example:
        wrong = {
            "blank": Example(" ", "1"),
            "number": Example("q", 3),  # type: ignore[arg-type]
            "column": Example("q", "1", {"when": {1, 2}}),
            "assistant": Example([{"role": "assistant", "content": "I say"}], "1"),
            "role": Example([{"content": "I say"}], "1"),
            "nan": Example("q", "1", {"level": float("nan")}),
            "half": Example("\ud83d x", "1"),
            "mixed": Example([1, "a"], "1"),  # type: ignore[list-item]
        }
        return super().__getitem__(index) if index < len(CITIES) - 1 else wrong[self.form]


def scored(prompt: str, response: str, answer: str, columns: dict[str, object]) -> float:
    return float(response == answer) + float(str(columns["index"]))


async def awaited(prompt: str, response: str, answer: str, *, columns: dict[str, object]) -> float:
    return scored(prompt, response, answer, columns)


class Scores:
    def score(self, sample: object) -> float:
        columns = sample.columns  # type: ignore[attr-defined]
        return float(columns["index"])


def easy(row: dict[str, object]) -> bool:
    return row["level"] == "easy"


def maybe(row: dict[str, object]) -> object:
    return row["level"]


def fails(row: dict[str, object]) -> bool:
    return bool(row["difficulty"])


def compared(row: dict[str, object]) -> object:
    return np.array([row["level"]])[0] == "easy"
