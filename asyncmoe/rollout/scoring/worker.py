"""A scoring process: one JSON line in, one JSON line out. `python -m asyncmoe.rollout.scoring.worker`.

First input line: {"target": "package.module:name", "options": {...}}; then one sample per line. First output line, once the target is
loaded: {"ready": true} or {"unusable": text}; then, per sample, {"value": ...} with the result of
`asyncmoe.rollout.scoring.plain_answer.plain`, or {"failed": reason, "detail": text}, or, if the target raised, {"failed": reason,
"raised": fields of `asyncmoe.rollout.scoring.tracebacks.Raised`}. The target's prints go to standard error. When standard
input ends, the worker closes the target's object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TextIO

from asyncmoe.errors import TrajectoryRejected, UserError
from asyncmoe.process import die_with_parent
from asyncmoe.rollout.scoring import plugin
from asyncmoe.rollout.scoring.plain_answer import plain
from asyncmoe.rollout.scoring.tracebacks import raised_by
from asyncmoe.rollout.scoring.types import ERROR, SHOWN, Sample, reason_of


def main() -> None:
    """Score samples until standard input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    wanted = json.loads(sys.stdin.readline())
    try:
        found = plugin.find(wanted["target"])
        ask, made = found.ask(wanted["options"])
    except UserError as error:
        _say(answers, {"unusable": str(error)})
        return
    _say(answers, {"ready": True})
    for line in sys.stdin:
        _say(answers, _answer(found, ask, Sample(**json.loads(line))))
    asyncio.run(plugin.close(made))


def _answer(found: plugin.Loaded, ask: Callable[[Sample], object], sample: Sample) -> dict[str, object]:
    try:
        return {"value": plain(ask(sample))}
    except TrajectoryRejected as rejected:
        return {"failed": rejected.reason, "detail": str(rejected).removeprefix(f"{rejected.reason}: ")[:SHOWN]}
    except BaseException as error:  # noqa: BLE001  the controller receives every error of user code
        return {"failed": reason_of(error, ERROR), "raised": asdict(raised_by(error, found.function))}


def _say(answers: TextIO, what: dict[str, object]) -> None:
    print(json.dumps(what), file=answers)


if __name__ == "__main__":
    main()
