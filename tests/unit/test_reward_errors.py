"""What reward functions of verifiers 0.1 raise, with rubrics like its own; tests/integrations/test_verifiers.py has the package."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe.rollout.adapters.reward_errors import RewardErrors


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def raises(completion: str) -> float:
    raise ValueError("no verdict")


async def raises_later(completion: str) -> float:
    raise KeyError("later")


def nothing(completion: str) -> None: ...


def environment(*functions: Callable[..., Any], weight: float = 1.0) -> Any:
    return SimpleNamespace(rubric=SimpleNamespace(funcs=list(functions), weights=[weight] * len(functions)))


def scored(errors: RewardErrors, functions: list[Callable[..., Any]]) -> tuple[list[float | None], list[str]]:
    """The scores, None where a function raises, and what is noted of one rollout."""

    async def one(function: Callable[..., Any]) -> float | None:
        given = {"completion": "4", "answer": "4"}
        try:
            result: float = await function(**{name: given[name] for name in inspect.signature(function).parameters})
        except (ValueError, KeyError, TypeError):
            return None
        return result

    async def run() -> tuple[list[float | None], list[str]]:
        noted = errors.begin()
        return await asyncio.gather(*map(one, functions)), noted

    return asyncio.run(run())


def test_what_reward_functions_raise_is_noted_for_their_rollout() -> None:
    given = environment(right, raises, raises_later, nothing)
    errors = RewardErrors(given)
    functions = given.rubric.funcs
    assert [function.__name__ for function in functions] == ["right", "raises", "raises_later", "nothing"]
    scores, noted = scored(errors, functions)
    assert scores == [1.0, None, None, None]
    assert noted[:2] == [
        "the reward function raises raised ValueError: no verdict",
        "the reward function raises_later raised KeyError: 'later'",
    ]
    assert noted[2].startswith("the reward function nothing raised TypeError: ")
    assert scored(errors, functions[:1]) == ([1.0], [])


def test_every_rubric_of_groups_is_watched_and_metrics_are_not() -> None:
    inner, grouped, metric = environment(raises), environment(raises), environment(raises, weight=0.0)
    whole = environment()
    whole.envs = [inner, metric]
    whole.rubric.rubrics = [grouped.rubric]
    errors = RewardErrors(whole)
    for one in (inner, grouped):
        assert len(scored(errors, one.rubric.funcs)[1]) == 1
    assert metric.rubric.funcs == [raises]
    with pytest.raises(ValueError, match="no verdict"):
        metric.rubric.funcs[0]("4")
