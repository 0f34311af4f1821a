"""Notes what the reward functions of an environment of verifiers 0.1 raise: its rubrics log that and count a reward of 0."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any


class RewardErrors:
    """Replaces the environment's reward functions with functions of the same signatures that also note what they raise.

    Functions of weight 0 stay: they are metrics, and change no reward.
    """

    def __init__(self, environment: Any) -> None:
        self._noted: ContextVar[list[str] | None] = ContextVar("noted", default=None)
        for rubric in _rubrics(environment):
            weighted = zip(rubric.funcs, rubric.weights, strict=True)
            rubric.funcs[:] = [self._noting(function) if weight else function for function, weight in weighted]

    def begin(self) -> list[str]:
        """Return the list to which errors of reward functions are added that run in the caller's context from now on."""
        noted: list[str] = []
        self._noted.set(noted)
        return noted

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Awaitable[float]]:
        name = getattr(function, "__name__", type(function).__name__)

        @functools.wraps(function)
        async def noting(*args: Any, **kwargs: Any) -> float:
            try:
                result = function(*args, **kwargs)
                return float(await result if inspect.isawaitable(result) else result)
            except Exception as error:
                if (noted := self._noted.get()) is not None:
                    noted.append(f"the reward function {name} raised {type(error).__name__}: {error}")
                raise

        noting.__name__ = name
        return noting


def _rubrics(environment: Any) -> Iterator[Any]:
    """Yield each rubric once: the environment's, those of a group of rubrics, and those of a group of environments."""
    waiting, seen = [environment], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        inner = [getattr(one, "rubric", None), *getattr(one, "rubrics", ()), *getattr(one, "envs", ())]
        waiting += [other for other in inner if other is not None]
        if hasattr(one, "funcs") and hasattr(one, "weights"):
            yield one
