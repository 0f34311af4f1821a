"""Tasks for a small chat model on two cores: sums, products with a calculator, answers in a wanted form, word problems of one step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

from asyncmoe.rollout.tasks import Example

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def _at_least(least: int, most: int) -> int:
    if most < least:
        raise ValueError(f"most: got {most}, expected at least {least}")
    return most


class Sums:
    """Every sum of two numbers from 0 to `most`, once in an epoch."""

    def __init__(self, most: int = 40) -> None:
        self._most = _at_least(1, most)

    def __len__(self) -> int:
        return (self._most + 1) ** 2

    def __getitem__(self, index: int) -> Example:
        left, right = divmod(index, self._most + 1)
        messages = [
            {"role": "system", "content": "Answer with one number."},
            {"role": "user", "content": f"What is {left} + {right}?"},
        ]
        return Example(messages, str(left + right), {"left": left, "right": right})


class Products:
    """Every product of two numbers from 2 to `most`, with a calculator; more than the model can do in its head.

    One call is shown: told only in words, the model never makes one, and nothing would reward it.
    """

    def __init__(self, most: int = 99) -> None:
        self._most = _at_least(2, most)

    def __len__(self) -> int:
        return (self._most - 1) ** 2

    def __getitem__(self, index: int) -> Example:
        left, right = (place + 2 for place in divmod(index, self._most - 1))
        messages = [
            {"role": "system", "content": "Write [calculator: 12*34] to compute, then answer with one number."},
            {"role": "user", "content": "What is 12 times 34?"},
            {"role": "assistant", "content": "[calculator: 12*34]"},
            {"role": "user", "content": f"What is {left} times {right}?"},
        ]
        return Example(messages, str(left * right), {"left": left, "right": right})


class OneStep:
    """The `most` shortest questions of a file in GSM8K's format (https://arxiv.org/abs/2110.14168) whose answer is one calculation."""

    def __init__(self, path: str, most: int = 320) -> None:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self._lines = sorted((one for one in lines if one["answer"].count("<<") == 1), key=lambda one: len(one["question"]))[
            : _at_least(1, most)
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Example:
        line = self._lines[index]
        messages = [
            {"role": "system", "content": "Compute, then end with the number that is asked for."},
            {"role": "user", "content": line["question"]},
        ]
        return Example(messages, line["answer"].rpartition("#### ")[2].replace(",", ""))


def number(prompt: str, response: str, answer: str) -> float:
    """1 if the last number of the response is the answer."""
    found = NUMBER.findall(response)
    return float(bool(found) and found[-1].replace(",", "") == answer)


WORDS = ("apple", "river", "stone", "cloud", "paper", "tiger", "bread", "chair", "ocean", "music", "lemon", "horse")


class Records:
    """Endless: a person to be written as a JSON object with the keys name, age and likes."""

    def draw(self, random: Random) -> Example:
        """Return one with a random name, age and word."""
        name = random.choice(("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn"))
        age, likes = random.randrange(5, 95), random.choice(WORDS)
        text = f"{name} is {age} years old and likes the word {likes}. Write it as JSON with the keys name, age and likes."
        return Example([{"role": "user", "content": text}], json.dumps({"name": name, "age": age, "likes": likes}))


def record(prompt: str, response: str, answer: str) -> float:
    """1 for the wanted object and nothing else, a quarter for any JSON object with the wanted keys and each right value of them, else 0."""
    try:
        said = json.loads(response)
    except ValueError:
        return 0.0
    wanted = json.loads(answer)
    if not isinstance(said, dict) or said.keys() != wanted.keys():
        return 0.0
    return 0.25 + 0.25 * sum(bool(said[key] == wanted[key]) for key in wanted)
