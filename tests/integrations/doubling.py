"""An environment of verifiers 0.1: numbers to double with a tool."""

from __future__ import annotations

from typing import Any

import verifiers
from datasets import Dataset


def double(x: int) -> str:
    """Twice x.

    Args:
        x: the number.
    """
    return str(2 * x)


async def right(completion: list[Any], answer: str) -> float:
    """1 for the answer as the last message's last word."""
    return float(str(completion[-1].content).split()[-1:] == [answer])


async def broken(completion: list[Any], answer: str) -> float:
    """Raise where it expects the answer 44."""
    if answer == "44":
        raise ValueError("the judge is away")
    return 0.0


def load_environment(count: int = 3, tools: bool = True, group: bool = False, raising: str = "") -> verifiers.Environment:
    """Return it, with `count` questions.

    Args:
        raising: where a reward function raises: "rubric", "group" of rubrics, or "metric" for one that counts nothing.
    """
    rows = [{"question": f"twice {n}?", "answer": str(2 * n), "info": {"n": n}} for n in range(21, 21 + count)]
    rubric = verifiers.Rubric(funcs=[right])
    if group:

        async def spread(completions: list[Any]) -> list[float]:
            return [0.0] * len(completions)

        rubric.add_reward_func(spread)
    if raising == "rubric":
        rubric.add_reward_func(broken)
    elif raising == "group":
        rubric = verifiers.RubricGroup([rubric, verifiers.Rubric(funcs=[broken])])
    elif raising == "metric":
        rubric.add_metric(broken)
    common: dict[str, Any] = {"dataset": Dataset.from_list(rows), "rubric": rubric, "system_prompt": "be brief"}
    common["eval_dataset"] = Dataset.from_list(rows[:1])
    common["sampling_args"] = {"temperature": 0.2}
    if tools:
        return verifiers.ToolEnv(tools=[double], max_turns=4, **common)
    return verifiers.SingleTurnEnv(**common)
