"""Try a user's own functions and family in a separate process, and import the user's own task, environment, agent and scorer there.

Whatever the code does, this process continues: the code may exit, crash, or never return. The run's processes try it again. `python -m
asyncmoe.launch.plugin_probe` is the separate process: it reads the configuration on standard input, and writes a line for each key on
standard output as soon as its code is tried. Output of the code goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from operator import attrgetter

from asyncmoe import config as configuration
from asyncmoe import models, plugins
from asyncmoe.config import Config
from asyncmoe.doctor import programs
from asyncmoe.errors import ConfigError, UserError, together
from asyncmoe.models import families
from asyncmoe.process import die_with_parent

_COMMAND = (sys.executable, "-m", "asyncmoe.launch.plugin_probe")
_IMPORTED = ("task.kind", "environment.kind", "environment.agent", "scoring.scorer")
"""Keys whose code is only imported here, and first used by the controller and its workers."""
_START_S = 300.0
"""Maximum seconds for the process to start, which imports torch."""


def named(config: Config) -> dict[str, str]:
    """Return the user's own code by the key that names it."""
    every = {families.KEY: config.model.family, **{key: attrgetter(key)(config) for key in _IMPORTED}}
    found = {key: target for key, target in every.items() if target is not None and plugins.is_name(target)}
    return found | {key: target for key, (target, _) in config.objective.own.items()}


def check(config: Config) -> dict[str, str]:
    """Try the user's own code, and return it as `named` does; a family is tried on the model, if this machine has it.

    Raises:
        UserError: names everything unusable; code that ended the process comes last.
    """
    if not (wanted := named(config)):
        return wanted
    limit_s = _START_S + len(wanted) * (plugins.IMPORT_S + plugins.CALL_S)
    ended = programs.run(_COMMAND, limit_s, json.dumps(config.model_dump(mode="json")))
    results = [json.loads(line) for line in ended.text.splitlines()]
    refused: list[UserError] = [ConfigError(**result) for result in results if result]
    if len(results) < len(wanted):
        key, target = list(wanted.items())[len(results)]
        got = f"{target}: the process that tried it {(ended.trouble or 'ended with status 0').removeprefix(f'{_COMMAND[0]} ')}"
        last = programs.last_line(ended.errors)
        hint = f"its last output: {last}" if last else None
        refused.append(ConfigError(key, got=got, expected="code that returns, and does not end the process", hint=hint))
    if refused:
        raise together(refused)
    return wanted


def _main() -> None:
    die_with_parent()
    config = configuration.parse(json.load(sys.stdin))
    results = os.dup(1)
    os.dup2(2, 1)
    for key, target in named(config).items():
        found: dict[str, str | None] = {}
        try:
            _try(config, key, target)
        except UserError as error:
            found = {"what": error.what, "got": str(error.got), "expected": str(error.expected), "hint": error.hint}
        os.write(results, json.dumps(found).encode() + b"\n")
    # The code may have started processes and threads, for which the interpreter's shutdown, or the reader of our output, would wait.
    os.killpg(os.getpid(), signal.SIGKILL)


def _try(config: Config, key: str, target: str) -> None:
    if key in _IMPORTED:
        plugins.load(target, key, forms=plugins.FORM, wanted="code that can be imported")
        return
    if key != families.KEY:
        from asyncmoe.trainer.objective import trial

        trial.try_one(config.objective, key)
        return
    try:
        hf = models.load_hf_config(config.model.path)
    except UserError:  # reported by the code that reads the model
        families.load_own(target)
    else:
        families.try_family(families.with_family(hf, target))


if __name__ == "__main__":
    _main()
