"""A user's own source of questions: loaded by name, and tried before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from asyncmoe import plugins
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.rollout.tasks.encode import drawn, example_at
from asyncmoe.rollout.tasks.types import Endless, Finite

FORMS = "arithmetic, jsonl, dataset or package.module:Class"
_WANTED = "a class with `draw(self, random)`, or with `__len__(self)` and `__getitem__(self, index)` (docs/guides/task.md)"


def load(target: str, options: Mapping[str, object], key: str) -> Finite | Endless:
    """Construct the source `package.module:Class`, and try it.

    Args:
        key: section that names the class, for messages.

    Raises:
        ConfigError: the class cannot be imported or constructed, or is not a source.
        DataError: it raises, it is empty, or its first or last example is invalid or differs when requested again.
    """
    found = plugins.load(target, f"{key}.kind", forms=FORMS, wanted="a class that can be imported")
    made = plugins.make(found, target, options, f"{key}.kind", f"a class that can be made with {key}.options")
    endless, finite = callable(getattr(made, "draw", None)), hasattr(made, "__len__") and hasattr(made, "__getitem__")
    if endless == finite:
        has = "both draw and __getitem__" if finite else "neither draw nor __getitem__ with __len__"
        raise ConfigError(f"{key}.kind", got=f"{target}, which has {has}", expected=_WANTED)
    name = f"{key}.kind {target}"
    try:
        with plugins.guarded(plugins.CALL_S):
            return _endless(made, name) if endless else _finite(made, name)
    except plugins.Failed as failed:
        raise DataError(name, got=str(failed), expected="examples") from failed


def _finite(source: Finite, name: str) -> Finite:
    size = plugins.called(lambda: len(source), f"{name}, __len__")
    if not size:
        raise DataError(name, got="no examples", expected="at least one")
    for index in (0, size - 1):
        if example_at(source, index, name) != example_at(source, index, name):
            raise _differs(f"{name}, example {index}", "return equal examples for equal indices")
    return source


def _endless(source: Endless, name: str) -> Endless:
    first, second = (drawn(source, Random("trial"), f"{name}, draw") for _ in range(2))
    if first != second:
        raise _differs(f"{name}, draw", "draw from the argument `random` only")
    return source


def _differs(what: str, hint: str) -> DataError:
    return DataError(what, got="another example when asked again", expected="the same example, so that a run can resume", hint=hint)
