"""The pipes of a process that runs a user's function: requests and answers, each a line of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TextIO

from asyncmoe.process import die_with_parent


def take() -> tuple[TextIO, Callable[[object], None]]:
    """Return the requests, and what sends an answer.

    From now on prints go to standard error, and standard input is empty, so that neither the function nor a process that it starts takes a
    request. A process that it has forked and that comes back ends without an answer.
    """
    die_with_parent()
    requests, answers, own = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1), os.getpid()
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def answer(what: object) -> None:
        if os.getpid() != own:
            os._exit(0)
        print(json.dumps(what), file=answers)

    return requests, answer
