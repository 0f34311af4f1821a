"""Whether a configuration's own functions and family can be used, tried in a process of their own.

Whatever the code does, this process goes on: it may end its own process, crash it, or never return. The trainer's ranks try it again.
`python -m asyncmoe.launch.plugin_probe` is that process: it reads the configuration on standard input, and writes a line for each key on
standard output as soon as its code is tried. Whatever the code prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
from functools import lru_cache
from pathlib import Path

from asyncmoe import config as configuration
from asyncmoe import models, plugins
from asyncmoe.config import Config
from asyncmoe.doctor import programs
from asyncmoe.doctor.programs import Output
from asyncmoe.errors import ConfigError, UserError, together
from asyncmoe.models import families
from asyncmoe.process import die_with_parent

_COMMAND = (sys.executable, "-m", "asyncmoe.launch.plugin_probe")
_START_S = 300.0
"""Longest start of the process, which imports torch."""
_GRACE_S = 5.0
"""How much later the process ends that tries code which goes on regardless of its limits."""
_LATE = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
"""What `faulthandler` writes when the time is over, and a line of its tracebacks."""


def named(config: Config) -> dict[str, str]:
    """Return the user's own code by the key that names it: "model.family", and those of the objective."""
    family = {families.KEY: config.model.family} if plugins.is_name(config.model.family) else {}
    return family | {key: target for key, (target, _) in config.objective.own.items()}


def check(config: Config) -> None:
    """Try the user's own code; a family on the model, if it is there.

    Raises:
        UserError: names everything that cannot be used, up to code that ended the process.
    """
    if wanted := named(config):
        _check(json.dumps(config.model_dump(mode="json")), tuple(wanted.items()), str(Path.cwd()))


@lru_cache(maxsize=1)
def _check(given: str, wanted: tuple[tuple[str, str], ...], directory: str) -> None:
    """Raise as `check`. A launcher looks at its machine and then prepares the run: the second call has the first's answer."""
    limits = (plugins.IMPORT_S, plugins.CALL_S, _GRACE_S)
    ended = programs.run((*_COMMAND, *map(str, limits)), _START_S + len(wanted) * sum(limits), given)
    results = [json.loads(line) for line in ended.text.splitlines()]
    refused: list[UserError] = [ConfigError(**result) for result in results if result]
    if len(results) < len(wanted):
        refused.append(_ended(*wanted[len(results)], ended))
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


def _main() -> None:
    die_with_parent()
    limits = [float(limit) for limit in sys.argv[1:]]
    plugins.IMPORT_S, plugins.CALL_S, _ = limits
    config = configuration.parse(json.load(sys.stdin))
    results = os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable()
    for key, target in named(config).items():
        if key != families.KEY:
            import asyncmoe.trainer.objective  # noqa: F401  torch takes seconds, which are not the code's
        # A C thread prints on standard error where Python is and ends the process, even if the code never returns to Python.
        faulthandler.dump_traceback_later(sum(limits), exit=True, file=2)
        found: dict[str, str | None] = {}
        try:
            _try(config, key, target)
        except UserError as error:
            found = {"what": error.what, "got": str(error.got), "expected": str(error.expected), "hint": error.hint}
        faulthandler.cancel_dump_traceback_later()
        os.write(results, json.dumps(found).encode() + b"\n")
    # The code may have started processes and threads, for which the interpreter's own end, or the reader of our output, would wait.
    os.killpg(os.getpid(), signal.SIGKILL)


def _try(config: Config, key: str, target: str) -> None:
    if key != families.KEY:
        from asyncmoe.trainer.objective import trial

        trial.try_one(config.objective, key)
        return
    try:
        hf = models.load_hf_config(config.model.path)
    except UserError:  # whoever reads the model reports it
        families.load_own(target)
    else:
        families.try_family(families.with_family(hf, target))


if __name__ == "__main__":
    _main()
