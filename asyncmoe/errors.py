"""All errors that asyncmoe raises on purpose. The command line prints each as one line without a traceback and exits with its `exit_code`.

A `UserError` or a subclass is a mistake that the user can fix. An `InvariantBroken` is a bug in asyncmoe: it stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
RECURRING = (2, 3)
"""Exit codes of failures that a restart does not fix: mistakes of the user, and wrong numbers or programs."""


class AsyncmoeError(Exception):
    """Base class of all errors raised on purpose by asyncmoe.

    Args:
        exit_code: exit code of the error that this one reports; None: the class's.
    """

    exit_code = 1
    """Exit status of a command or process that ends with the error; see `RECURRING`."""
    where = ""
    """Role and node of the process that raised the error, in a run of several processes; see `asyncmoe.process.named`."""

    def __init__(self, *text: object, exit_code: int | None = None) -> None:
        super().__init__(*text)
        self.exit_code = self.exit_code if exit_code is None else exit_code


class Interrupted(AsyncmoeError):
    """The user stopped the command. The text says what is saved and how to resume.

    Args:
        number: the signal; the exit status is 128 + `number`, as in a shell.
    """

    exit_code = 130

    def __init__(self, text: str, number: int = 2) -> None:
        super().__init__(text, exit_code=128 + number)


class RunStopping(AsyncmoeError):
    """The controller refuses a request because the run is stopping and the trainer has saved its state."""


class UserError(AsyncmoeError):
    """A mistake that the user can fix.

    Args:
        what: the wrong item, in the user's terms ("trainer.tp", "port 30000", "train.jsonl line 7").
        got: the actual value.
        expected: the valid values.
        hint: the fix; omitted if `expected` already implies it.

    Attributes:
        rest: of an error about keys: the configuration without these keys, to be checked further; None if that is no configuration.
    """

    exit_code = 2
    rest: Any = None

    def __init__(self, what: str, *, got: object, expected: object, hint: str | None = None) -> None:
        self.what, self.got, self.expected, self.hint = what, got, expected, hint
        line = f"{what}: got {got}, expected {expected}"
        super().__init__(f"{line}; {hint}" if hint else line)


def an(word: str) -> str:
    """Return a noun with its indefinite article; names of Python types become English words."""
    noun = {"int": "integer", "str": "string", "bool": "truth value", "NoneType": "None"}.get(word, word)
    return noun if noun == "None" else f"{'an' if noun[:1].lower() in set('aeiou') else 'a'} {noun}"


def together(errors: Sequence[UserError]) -> UserError:
    """Merge errors into one with a line for each. `errors` is not empty."""
    first, *others = errors
    if others:
        first.args = ("\n".join(str(error) for error in errors),)
    return first


class Faults:
    """Collects the errors of several checks, to raise them together."""

    def __init__(self, *known: UserError) -> None:
        self.found = list(known)

    def add(self, error: UserError) -> None:
        """Keep an error, except lines about what is refused already: they repeat it, or follow from it."""
        known = [_subject(line) for one in self.found for line in str(one).split("\n")]
        if new := [line for line in str(error).split("\n") if not any(_concerns(line, subject) for subject in known)]:
            error.args = ("\n".join(new),)
            self.found.append(error)

    def of(self, check: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """Call a check; keep its UserError and return None, or return its result."""
        try:
            return check(*args, **options)
        except UserError as error:
            self.add(error)
            return None

    def refuse(self) -> None:
        """Raise the errors as one, if there are any."""
        if self.found:
            raise together(self.found)


def _subject(line: str) -> str:
    """Return what an error's line is about: the key, without the file and its line."""
    return line.partition(": got ")[0].rpartition(": ")[2]


def _concerns(line: str, subject: str) -> bool:
    about = _subject(line)
    return about == subject or subject.startswith(f"{about}.") or (("." in subject or "/" in subject) and subject in line)


class ConfigError(UserError):
    """A wrong key, type, value or combination in the configuration."""


class DataError(UserError):
    """Unusable task data, model directory or checkpoint."""


class LayoutError(UserError):
    """Inconsistent layouts, within themselves or with each other; names the tensor or storage, the rank and the box."""


class ProtocolError(AsyncmoeError):
    """A malformed, oversized or out-of-turn message on one of our sockets."""


class StorageError(AsyncmoeError):
    """A failed write: the disk is full, the quota exceeded, the file system read-only or broken. See `asyncmoe.storage`."""

    exit_code = 2


class EngineError(AsyncmoeError):
    """An SGLang engine did not start, died, or answered with an error."""


class WeightSyncError(AsyncmoeError):
    """A weight version could not be published; the engines still serve the previous version, or are fenced."""


class ReportedFailure(WeightSyncError):
    """A failure reported by the rank on which it happened; its text already says where."""


class OutOfDeviceMemory(UserError):
    """A device has too little free memory.

    Args:
        device: "cuda:1".
        what: purpose of the memory.
        nbytes: requested bytes; None: unknown.
        free, total: free and total bytes of the device.
    """

    HINT = "lower engines.max_total_tokens, --mem-fraction-static in engines.args, or sync.bucket_bytes"

    def __init__(self, device: str, what: str, nbytes: int | None, free: int, total: int) -> None:
        got, wanted = f"{gibibytes(free)} free of {gibibytes(total)}", "enough memory" if nbytes is None else gibibytes(nbytes)
        super().__init__(f"memory of {device} for {what}", got=got, expected=wanted, hint=self.HINT)


def gibibytes(nbytes: int) -> str:
    """Format a number of bytes for people."""
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 10 << 20 else f"{nbytes / (1 << 20):.2f} MiB"


class TransferError(WeightSyncError):
    """A message between two ranks arrived damaged, or one of the ranks disappeared during the exchange.

    Args:
        source, destination: the sending and the receiving rank.
        what: description of the failure.
    """

    def __init__(self, source: int, destination: int, what: str) -> None:
        self.source, self.destination, self.what = source, destination, what
        super().__init__(f"from rank {source} to rank {destination}: {what}")


class TrajectoryRejected(AsyncmoeError):
    """A trajectory is unfit for training. `reason` is the short name under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason[:100]
        # A user's code may raise any text: too long, or with a lone surrogate, which neither a log nor a record can hold.
        super().__init__(f"{self.reason}: {detail[:2000].encode(errors='replace').decode()}")


class Disagreement(AsyncmoeError):
    """An engine's weights differ from the trainer's; nothing was sampled with them."""

    exit_code = 3


class AnomalyFound(AsyncmoeError):
    """A rule of `verify` stops the run before an update with the batch."""

    exit_code = 3


class WaitTimeout(AsyncmoeError):
    """A timeout. Names the awaited party, the awaited event and the waiting time."""

    def __init__(self, whom: str, what: str, seconds: float) -> None:
        self.whom, self.what, self.seconds = whom, what, seconds
        super().__init__(f"waited {seconds:.1f} s for {whom}: {what}")


class InvariantBroken(AsyncmoeError):
    """An invariant of asyncmoe is violated. The run stops rather than train on wrong data."""

    exit_code = 3
