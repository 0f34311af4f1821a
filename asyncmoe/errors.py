"""Every error a user or a caller can meet, with what was got, what was expected, and the cure.

`UserError` and its children are mistakes the user can mend: the command line prints them as one line without a traceback and
exits with `exit_code`. `InvariantBroken` is a mistake of ours: it stops the run and keeps its traceback.
"""

from __future__ import annotations


class AsyncmoeError(Exception):
    """Root of all errors raised on purpose by asyncmoe."""

    exit_code = 1
    where = ""
    """Role and node of the process that met it, in a run of several; see `asyncmoe.process.named`."""


class UserError(AsyncmoeError):
    """A mistake the user can mend.

    Args:
        what: the thing that is wrong, named as the user knows it ("trainer.tp", "port 30000", "train.jsonl line 7").
        got: what was found there.
        expected: what would have been right.
        cure: what to do about it; omitted when `expected` says it all.
    """

    exit_code = 2

    def __init__(self, what: str, *, got: object, expected: object, cure: str | None = None) -> None:
        self.what, self.got, self.expected, self.cure = what, got, expected, cure
        line = f"{what}: got {got}, expected {expected}"
        super().__init__(f"{line}; {cure}" if cure else line)


class ConfigError(UserError):
    """A wrong key, type, value or combination in the configuration."""


class DataError(UserError):
    """Task data, a model directory or a checkpoint that cannot be used."""


class LayoutError(UserError):
    """Layouts that contradict each other or themselves; names the tensor or storage, the rank and the box."""


class ProtocolError(AsyncmoeError):
    """A message on one of our sockets that is malformed, too large or out of turn."""


class StorageError(AsyncmoeError):
    """A file that could not be written: a full disk, a used-up quota, a file system that is read-only or broken. See `asyncmoe.storage`."""

    exit_code = 2


class EngineError(AsyncmoeError):
    """An SGLang engine that did not start, died, or answered with an error."""


class WeightSyncError(AsyncmoeError):
    """A weight version that could not be published; the engines still serve the version before it, or are fenced."""


class OutOfDeviceMemory(UserError):
    """A device that has no memory left for something.

    Args:
        device: "cuda:1".
        what: what it was wanted for.
        nbytes: how much; None where that is not known.
        free, total: bytes that are free on the device, and all it has; None where that is not known.
    """

    CURE = (
        "leave more of the device free: engines.max_total_tokens, or --mem-fraction-static in engines.args, "
        "a smaller sync.bucket_bytes, or sync.staging=false"
    )

    def __init__(self, device: str, what: str, nbytes: int | None = None, free: int | None = None, total: int | None = None) -> None:
        wanted = "as much as it needs" if nbytes is None else gibibytes(nbytes)
        got = "no memory left" if free is None else f"{gibibytes(free)} free" + (f" of {gibibytes(total)}" if total is not None else "")
        super().__init__(f"memory of {device} for {what}", got=got, expected=wanted, cure=self.CURE)


def gibibytes(nbytes: int) -> str:
    """A number of bytes, to be read."""
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 10 << 20 else f"{nbytes / (1 << 20):.2f} MiB"


class TransferError(WeightSyncError):
    """A message between two ranks that arrived damaged, or a rank that went away while it was exchanged with.

    Args:
        source, destination: the ranks the message was to go from and to.
        what: what became of it.
    """

    def __init__(self, source: int, destination: int, what: str) -> None:
        self.source, self.destination, self.what = source, destination, what
        super().__init__(f"from rank {source} to rank {destination}: {what}")


class TrajectoryRejected(AsyncmoeError):
    """A trajectory that must not be trained on. `reason` is the short name it is counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}")


class Disagreement(AsyncmoeError):
    """Engine and trainer give what was sampled probabilities further apart than `verify` allows; nothing was trained on it."""


class WaitTimeout(AsyncmoeError):
    """A wait that ran out. Names whom it waited for, what for, and how long."""

    def __init__(self, whom: str, what: str, seconds: float) -> None:
        self.whom, self.what, self.seconds = whom, what, seconds
        super().__init__(f"waited {seconds:.1f} s for {whom}: {what}")


class InvariantBroken(AsyncmoeError):
    """Something that cannot happen happened. The run stops rather than train on wrong data."""
