"""Load a user's own code by its name, `package.module:name`: scorers, tools, environments, agents, parts of the objective, model families.

Every process that needs a name imports it: from the working directory first, then from `PYTHONPATH` and the installed packages.
`guarded` limits the code's time, and converts anything but a normal return to one error.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from asyncmoe.errors import ConfigError, DataError, UserError, an

T = TypeVar("T")
log = logging.getLogger(__name__)
FORM = "package.module:name"
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
IMPORT_S, CALL_S, MAKE_S = 120.0, 60.0, 600.0
"""Time limits of an import, which may load packages from a cold shared file system; of a trial call, which takes a second or less; and of a
constructor, which may read files."""
_LEAVE_S = 5.0
"""Seconds a cancelled coroutine may take to end: a tool may have processes to end. Added to every limit."""
_AGAIN_S = 1.0
"""Seconds between alarms: code that catches everything is interrupted again until it ends."""
_OURS = str(Path(__file__).parent) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
LIBRARIES = (_OURS, *_INSTALLED, *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


def is_name(text: str) -> bool:
    """Return whether a text has the form `package.module:name`."""
    return NAME.fullmatch(text) is not None


class Failed(Exception):
    """A user's code did not return. The text says what it did instead, and where; `__cause__` is what it raised."""


class Overdue(Exception):
    """A user's coroutine took too long."""


class _TooLong(BaseException):
    """Raised in a user's code by the alarm. Not an Exception, because such code often catches those."""


@contextmanager
def guarded(seconds: float) -> Iterator[None]:
    """Run a user's code in the block; end it after `seconds` if this is the main thread.

    The limit is an alarm (setitimer(2)). Every process of a run imports and tries users' code in its main thread, where Python runs the
    alarm's handler, between two bytecodes or after an interrupted system call. So the alarm ends loops, sleeps, locks and reads, and knows
    the line. It cannot end native code that never returns to Python. `asyncmoe.launch.plugin_probe` therefore tries the code first in a
    process that can be killed. Other threads get no signals: there the block is not limited.

    Raises:
        Failed: the code raised anything, SystemExit included, or took longer.
        UserError: raised by the code itself.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    late, active = "", False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal late
        if active:
            late = late or place_in(traceback.walk_stack(frame)) or "an unknown line"
            raise _TooLong

    limited = threading.current_thread() is threading.main_thread()
    if limited:
        before = signal.signal(signal.SIGALRM, ring)
        timer = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    error: BaseException | None = None
    try:
        active = True
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as raised:  # noqa: BLE001  SystemExit would end the process without a word
        error = raised
    finally:
        active = False
        if limited:
            signal.setitimer(signal.ITIMER_REAL, 0)  # before its handler is removed: an alarm without one ends the process
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, *timer)
    if late:
        raise Failed(f"no result within {seconds:g} s, at {late}") from error
    if error is not None:
        raise Failed(told_at(error)) from error


async def awaited(ask: Callable[[], Awaitable[T]], seconds: float, whose: str) -> T:
    """Call a user's coroutine function and await it in a task of its own, so that it cannot affect the caller's task.

    A coroutine that has not ended `_LEAVE_S` after it was cancelled is abandoned.

    Raises:
        Overdue: it took longer than `seconds`.
        Failed: it raised something other than an Exception: SystemExit, GeneratorExit or, as code based on anyio does by mistake, a
            CancelledError though nobody cancelled it.
        Exception: any other exception that it raised.
    """
    loop = asyncio.get_running_loop()

    async def contained() -> T:
        try:
            return await ask()
        except Exception:
            raise
        except BaseException as error:  # SystemExit would end the event loop, and no caller expects a GeneratorExit
            if not loop.is_running():  # Python closes an abandoned coroutine
                raise
            raise Failed(told_at(error)) from error

    task = asyncio.create_task(contained())
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieves an exception that nobody may wait for any more
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        if not task.done() and not await ended([task], _LEAVE_S):
            log.warning("%s does not end when it is cancelled, and is abandoned", whose)
    if not done:
        raise Overdue(f"{whose} took longer than {seconds:g} s")
    return task.result()


def make(found: Callable[..., Any], target: str, options: Mapping[str, object], key: str, expected: str) -> Any:
    """Construct a user's class.

    Raises:
        ConfigError: it cannot be made with these options, or takes longer than `MAKE_S`.
        UserError: raised by the class itself.
    """
    try:
        with guarded(MAKE_S):
            return found(**options)
    except Failed as failed:
        raise ConfigError(key, got=f"{target}: {failed}", expected=expected) from failed


def called(ask: Callable[[], T], where: str) -> T:
    """Call a user's code and return its result; convert what it raises, except a UserError, to DataError."""
    try:
        return ask()
    except UserError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # SystemExit would end the process without a word
        raise DataError(where, got=told_at(error), expected="a value, not an exception") from error


async def ended(tasks: Collection[asyncio.Task[Any]], seconds: float) -> bool:
    """Cancel tasks and wait for them; return whether all ended in time. The event loop's shutdown does not wait for the rest either."""
    for task in tasks:
        task.cancel()
    deaf = (await asyncio.wait(tasks, timeout=seconds))[1] if tasks else ()
    for task in deaf:
        asyncio.tasks._unregister_task(task)
    return not deaf


def load(target: str, key: str, *, forms: str, wanted: str) -> Any:
    """Import `package.module:name` and return the object of that name.

    Args:
        key: the configuration key that names it, for messages.
        forms: the values that the key accepts.
        wanted: the expected object, for example "a function that can be imported".

    Raises:
        ConfigError: the target is not of this form, or cannot be imported.
        UserError: raised by the module itself.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(key, got=repr(target), expected=forms)
    try:
        # An imported module needs no limit, and layouts look up their family often.
        with nullcontext() if module in sys.modules else guarded(IMPORT_S):
            return getattr(importlib.import_module(module), name)
    except UserError:
        raise
    except Exception as error:
        failed = error if isinstance(error, Failed) else Failed(told(error))
        hint = _import_hint(error.__cause__ if isinstance(error, Failed) else error, module, name)
        raise ConfigError(key, got=f"{target}: {failed}", expected=wanted, hint=hint) from error


def _import_hint(error: BaseException | None, module: str, name: str) -> str | None:
    """Return the name that a misspelt one most likely means, or where a missing module was looked for."""
    loaded = sys.modules.get(module)
    if isinstance(error, AttributeError) and loaded is not None:
        near = nearest(name, [one for one in vars(loaded) if not one.startswith("_")])
        return f"did you mean {module}:{near}?" if near else None
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"looked for {error.name} in {Path.cwd()}, in PYTHONPATH and in the packages of {sys.executable}"
    return None


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that a misspelt one most likely means; None if none is near."""
    known = {one.lower(): one for one in names}
    near = get_close_matches(name.lower(), known, 1)
    return known[near[0]] if near else None


def load_function(target: str, key: str, *, forms: str) -> Callable[..., object]:
    """Load a function or another callable. Raises as `load` does, and ConfigError if the object cannot be called."""
    function = load(target, key, forms=forms, wanted="a function that can be imported")
    if not callable(function):
        raise ConfigError(key, got=f"{target}, {an(type(function).__name__)}", expected="a function")
    return cast(Callable[..., object], function)


def told(error: BaseException) -> str:
    """Format an exception in one line; a `Failed` as its text alone."""
    text = ""
    with suppress(BaseException):  # str() may be code of the user's class
        text = " ".join(str(error).split())[:1000]
    return text if isinstance(error, Failed) else ": ".join(filter(None, (type(error).__name__, text)))


def place(found: Callable[..., object]) -> str:
    """Return where a function is defined, as "FILE:LINE"; "no source file" if it is not written in Python."""
    code = getattr(inspect.unwrap(found), "__code__", None)
    return "no source file" if code is None else f"{short(code.co_filename)}:{code.co_firstlineno}"


def raised_at(error: BaseException) -> str:
    """Return the user's line that raised an exception or called what raised it, as "FILE:LINE"; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename is not None and Path(error.filename).is_file():
        return f"{short(error.filename)}:{error.lineno}"
    return place_in(reversed([*traceback.walk_tb(error.__traceback__)]))


def told_at(error: BaseException) -> str:
    """Format an exception in one line, with the user's line that raised it, if any."""
    return " at ".join(filter(None, (told(error), raised_at(error))))


def place_in(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first of (frame, line number) pairs in the user's own code, else the first in an installed package; "" if there is
    none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in frames]
    own = (one for one in lines if not one[0].startswith(("<", *LIBRARIES)))
    installed = (one for one in lines if one[0].startswith(_INSTALLED))
    return next((f"{short(file)}:{line}" for file, line in (*own, *installed)), "")


def short(file: str) -> str:
    """Return a file's path, relative to the working directory if it lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def takes(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # built in, without a signature


def source_digest(target: str) -> str:
    """Return the SHA-256 in hex of the file of a loaded target's module; "" if it has no file."""
    file = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
