"""A user's scorer: loaded by name and, if it is a coroutine function, run in the rollout worker's event loop."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from asyncmoe import plugins
from asyncmoe.errors import ConfigError, TrajectoryRejected, an
from asyncmoe.plugins import takes
from asyncmoe.rollout.scoring.types import SHOWN, TIMEOUT, Sample, ScorerRaised, reason_of

log = logging.getLogger(__name__)
EXPECTED = "auto, exact, math_verify, none, http://host:port/path, package.module:function or package.module:Class"
_CLOSE_S = 5.0
_FRAMES, _TRACE_CHARS = 32, 8000


@dataclass(frozen=True)
class Loaded:
    """A user's function or class. `function`: the function itself, or the class's method `score`."""

    target: str
    found: Callable[..., Any]
    function: Callable[..., Any]
    is_class: bool

    def ask(self, options: Mapping[str, object]) -> tuple[Callable[[Sample], object], object | None]:
        """Return the function to call with a sample, and the instance behind it, if any. Raises ConfigError if it cannot be made."""
        if self.is_class:
            made = plugins.make(self.found, self.target, options, "scoring.options", "arguments that the class accepts")
            return made.score, made
        if takes(self.found, "columns"):
            return lambda sample: self.found(sample.prompt, sample.response, sample.answer, columns=sample.columns), None
        return lambda sample: self.found(sample.prompt, sample.response, sample.answer), None


def find(target: str) -> Loaded:
    """Import `package.module:name`.

    Raises:
        ConfigError: the target cannot be imported, is not callable, or is a class without a method `score`.
    """
    found = plugins.load(target, "scoring.scorer", forms=EXPECTED, wanted="a function or class that can be imported")
    is_class = inspect.isclass(found)
    function = getattr(found, "score", None) if is_class else found
    if not callable(function):
        got = "a class without a method score" if is_class else an(type(found).__name__)
        raise ConfigError("scoring.scorer", got=f"{target}, {got}", expected="a function, or a class with score(sample)")
    return Loaded(target, found, function, is_class)


def raised_by(error: BaseException, scorer: Callable[..., Any]) -> dict[str, str]:
    """Describe an exception that a call of `scorer` raised, keyed by the names of `ScorerRaised`'s arguments."""
    trace = "".join(traceback.format_exception(error, limit=-_FRAMES))
    at = plugins.raised_at(error) or plugins.place(scorer)
    return {"at": at, "said": plugins.told(error)[:SHOWN], "trace": trace[:_TRACE_CHARS]}


async def close(made: object | None) -> None:
    """Call the object's `close`, plain or coroutine, if it has one."""
    method = getattr(made, "close", None)
    if callable(method):
        left = method()
        if inspect.isawaitable(left):
            await cast(Awaitable[object], left)


async def close_own(made: object | None, whose: str, seconds: float = _CLOSE_S) -> None:
    """Close a user's object. Errors are only logged: the run is over, and its result stands."""
    try:
        await plugins.awaited(lambda: close(made), seconds, f"{whose}'s close()")
    except Exception as error:  # noqa: BLE001  user code may raise anything
        log.warning("%s's close() failed: %s", whose, plugins.told(error))


class AsyncScorer:
    """A user's coroutine function or method: see `Judge`.

    Args:
        ask: the coroutine function, called with a sample.
        function: the user's function or method, for messages.
        made: the object that owns it, if any; `close` closes it.
        timeout_s: limit for one call.
    """

    def __init__(self, ask: Callable[[Sample], object], function: Callable[..., Any], made: object | None, timeout_s: float) -> None:
        self._ask = cast(Callable[[Sample], Awaitable[object]], ask)
        self._function, self._made, self._timeout_s = function, made, timeout_s

    async def call(self, sample: Sample) -> object:
        """See `Judge`."""
        try:
            return await plugins.awaited(lambda: self._ask(sample), self._timeout_s, "the scorer")
        except TrajectoryRejected:
            raise
        except plugins.Overdue as error:
            raise TrajectoryRejected(TIMEOUT, str(error)) from error
        except Exception as error:
            raise ScorerRaised(reason_of(error), **raised_by(error, self._function)) from error

    async def close(self) -> None:
        """See `Judge`."""
        await close_own(self._made, "the scorer")
