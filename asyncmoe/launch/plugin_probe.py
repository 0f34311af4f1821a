"""Whether a configuration's own functions and family can be used, tried in a process of their own.

Whatever the code does, this process goes on: it may end its own process, crash it, or never return. The trainer's ranks try it again.
"""

from __future__ import annotations

import logging
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from asyncmoe import models, plugins
from asyncmoe.config import Config
from asyncmoe.doctor import programs
from asyncmoe.doctor.programs import Output
from asyncmoe.errors import ConfigError, UserError, together
from asyncmoe.launch.plugin_messages import Request, Result

log = logging.getLogger(__name__)
_COMMAND = (sys.executable, "-m", "asyncmoe.launch.plugin_trial")
_START_S = 300.0
"""Longest start of the process, which imports torch."""
_GRACE_S = 5.0
FAMILY = "model.family"
_LATE = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
"""What `faulthandler` writes when the time is over, and a line of its tracebacks."""


def named(config: Config) -> dict[str, str]:
    """Return the user's own code by the key that names it: "model.family", and those of the objective."""
    family = {FAMILY: config.model.family} if plugins.is_name(config.model.family) else {}
    return family | {key: target for key, (target, _) in config.objective.own.items()}


def check(config: Config) -> None:
    """Try the user's own code; a family on the model, if it is there.

    Raises:
        UserError: names everything that cannot be used.
    """
    if wanted := named(config):
        hf = _hf(config.model.path) if FAMILY in wanted else None
        objective = config.objective.model_dump(mode="json")
        _try(msgspec.json.encode(Request(wanted, hf, objective, plugins.IMPORT_S, plugins.CALL_S, _GRACE_S)), str(Path.cwd()))


def _hf(path: Path) -> dict[str, Any] | None:
    try:
        return models.load_hf_config(path)
    except UserError:  # whoever reads the model reports it
        return None


@lru_cache(maxsize=1)
def _try(encoded: bytes, directory: str) -> None:
    """Raise as `check`. A launcher looks at its machine and then prepares the run: the second call has the first's answer."""
    request = msgspec.json.decode(encoded, type=Request)
    left = request.targets
    for key, target in left.items():
        log.debug("trying %s %s: at most %g s for its import, %g s for its trial", key, target, request.import_s, request.call_s)
    refused: list[UserError] = []
    while left:
        given = msgspec.json.encode(msgspec.structs.replace(request, targets=left)).decode()
        ended = programs.run(_COMMAND, _START_S + len(left) * request.whole_s, given)
        results = [msgspec.json.decode(line, type=Result) for line in ended.text.splitlines()]
        refused += [ConfigError(one.what, got=one.got, expected=one.expected, hint=one.hint) for one in results if one.refused]
        rest = list(left.items())[len(results) :]
        if rest and not any(one.refused for one in results):  # the process ended in the trial of the first
            refused.append(_ended(*rest.pop(0), ended))
        left = dict(rest)
    if refused:
        raise together(refused)


def _ended(key: str, target: str, ended: Output) -> UserError:
    """Return the error for code during whose trial the process ended; a traceback that `faulthandler` wrote says where the code was."""
    late = _LATE.search(ended.errors) is not None
    # The main thread is the last of all threads; after a fault, the faulty one is the current.
    dumped = ended.errors.rpartition("(most recent call first):" if late else "Current thread")[2]
    where = plugins.place_in([(file, int(line)) for file, line in _FRAME.findall(dumped)])
    trouble = (ended.trouble or "ended with status 0").removeprefix(f"{_COMMAND[0]} ")
    how = "it did not end in time" if late else f"the process that tried it {trouble}"
    last = None if where else programs.last_line(ended.errors) or None
    return ConfigError(
        key,
        got=f"{target}: {how}{f', at {where}' if where else ''}",
        expected="code that returns, and does not end the process",
        hint=None if last is None else f"it said last: {last}",
    )
