"""Try a user's code in this process: `python -m asyncmoe.launch.plugin_trial`, started by `asyncmoe.launch.plugin_probe`.

Reads a `Request` on standard input and writes a `Result` for each key on standard output, as soon as it is known: the code may end the
process, even with `os._exit` or a broken pointer. Whatever the code prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

import msgspec

from asyncmoe import plugins
from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import UserError
from asyncmoe.launch.plugin_messages import Request, Result
from asyncmoe.models import families
from asyncmoe.process import die_with_parent


def main() -> None:
    """Try the keys of the request in order, until the code of one is refused."""
    die_with_parent()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    plugins.IMPORT_S, plugins.CALL_S = request.import_s, request.call_s
    results = os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable()
    for key, target in request.targets.items():
        if key != families.KEY:
            import asyncmoe.trainer.objective  # noqa: F401  torch takes seconds, which are not the code's
        # A C thread prints on standard error where Python is and ends the process, even if the code never returns to Python.
        faulthandler.dump_traceback_later(request.whole_s, exit=True, file=2)
        try:
            _try(key, target, request)
            found = Result(key)
        except UserError as error:
            found = Result(key, True, error.what, str(error.got), str(error.expected), error.hint)
        faulthandler.cancel_dump_traceback_later()
        os.write(results, msgspec.json.encode(found) + b"\n")
        if found.refused:
            break  # an interrupted import may leave modules half imported; the rest is tried in another process
    # The code may have started processes and threads, for which the interpreter's own end, or the reader of our output, would wait.
    os.killpg(os.getpid(), signal.SIGKILL)


def _try(key: str, target: str, request: Request) -> None:
    if key != families.KEY:
        from asyncmoe.trainer.objective import trial

        trial.try_one(ObjectiveSection.model_validate(request.objective), key)
    elif request.hf is None:
        families.load_own(target)
    else:
        families.try_family(families.with_family(request.hf, target))


if __name__ == "__main__":
    main()
