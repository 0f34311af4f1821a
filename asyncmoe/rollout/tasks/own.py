"""A user's own source of questions: loaded by name, and tried before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from asyncmoe import plugins
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.rollout.tasks.encode import check
from asyncmoe.rollout.tasks.types import Endless, Example, Finite

FORMS = "arithmetic, jsonl, dataset or package.module:Class"
_WANTED = "a class with `draw(self, random)`, or with `__len__(self)` and `__getitem__(self, index)` (docs/guides/task.md)"


def load(target: str, options: Mapping[str, object], key: str) -> Finite | Endless:
    """Make the source `package.module:Class`, and try it.

    The source that is returned names the user's file and line in the DataError of whatever its code raises.

    Args:
        key: section that names the class, for messages.

    Raises:
        ConfigError: the class cannot be imported or made, or is no source.
        DataError: it raises, it is empty, or its first or last example is none or differs when it is asked for again.
    """
    found = plugins.load(target, f"{key}.kind", forms=FORMS, wanted="a class that can be imported")
    made = plugins.make(found, target, options, f"{key}.kind", f"a class that can be made with {key}.options")
    endless, finite = callable(getattr(made, "draw", None)), hasattr(made, "__len__") and hasattr(made, "__getitem__")
    if endless == finite:
        raise ConfigError(f"{key}.kind", got=f"{target}, which has {'both' if finite else 'neither'}", expected=_WANTED)
    name = f"{key}.kind {target}"
    try:
        with plugins.guarded(plugins.CALL_S):
            return _endless(made, name) if endless else _finite(made, name)
    except plugins.Failed as failed:
        raise DataError(name, got=str(failed), expected="examples") from failed


class _Listed:
    def __init__(self, source: Finite, name: str) -> None:
        self._source, self._name = source, name
        self._size = plugins.called(lambda: len(source), f"{name}, __len__")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        return _guarded(lambda: self._source[index], f"{self._name}, example {index}")


class _Drawn:
    def __init__(self, source: Endless, name: str) -> None:
        self._source, self._name = source, name

    def draw(self, random: Random) -> Example:
        return _guarded(lambda: self._source.draw(random), f"{self._name}, draw")


def _finite(source: Finite, name: str) -> Finite:
    listed = _Listed(source, name)
    if not len(listed):
        raise DataError(name, got="no examples", expected="at least one")
    for index in (0, len(listed) - 1):
        if listed[index] != listed[index]:
            raise _differs(f"{name}, example {index}", "return equal examples for equal indices")
    return listed


def _endless(source: Endless, name: str) -> Endless:
    drawn = _Drawn(source, name)
    if drawn.draw(Random("trial")) != drawn.draw(Random("trial")):
        raise _differs(f"{name}, draw", "draw from the argument `random` only")
    return drawn


def _differs(what: str, hint: str) -> DataError:
    return DataError(what, got="another example when asked again", expected="the same, so that a run can resume", hint=hint)


def _guarded(ask: Callable[[], Example], where: str) -> Example:
    example = plugins.called(ask, where)
    check(example, where)
    return example
