"""What the process that tries a user's code is told, and what it answers."""

from __future__ import annotations

from typing import Any

import msgspec


class Request(msgspec.Struct, frozen=True):
    """What to try.

    Attributes:
        targets: the names of the code, by the configuration keys that name it, in order.
        hf: config.json of the model, on which a family is tried; None: it is only imported.
        objective: the section of the configuration.
        import_s, call_s: limits of an import and of a trial.
        grace_s: how much later the process ends that tries code which goes on regardless.
    """

    targets: dict[str, str]
    hf: dict[str, Any] | None
    objective: dict[str, Any]
    import_s: float
    call_s: float
    grace_s: float

    @property
    def whole_s(self) -> float:
        """Limit of a key whose code the other limits do not end."""
        return self.import_s + self.call_s + self.grace_s


class Result(msgspec.Struct, frozen=True):
    """The result of a key: whether its code was refused, and `what`, `got`, `expected` and `hint` of the error that refused it."""

    key: str
    refused: bool = False
    what: str = ""
    got: str = ""
    expected: str = ""
    hint: str | None = None
