"""A process that scores: a JSON line in, a JSON line out. `python -m asyncmoe.rollout.scoring.worker`.

First line in: {"target": "package.module:name", "options": {...}}; then samples. First line out, once the target is there:
{"ready": true} or {"unusable": text}; then {"value": ...}, as `asyncmoe.rollout.scoring.parse_score.plain` gives it, or {"failed": reason,
"detail": text}. What the target prints goes to standard error. When standard input ends an object is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import TextIO

from asyncmoe.errors import TrajectoryRejected, UserError
from asyncmoe.process import die_with_parent
from asyncmoe.rollout.scoring import plugin
from asyncmoe.rollout.scoring.judge import SHOWN, reason_of, said
from asyncmoe.rollout.scoring.parse_score import plain
from asyncmoe.rollout.scoring.types import ERROR, Sample


def main() -> None:
    """Answer until standard input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    wanted = json.loads(sys.stdin.readline())
    try:
        ask, made = plugin.find(wanted["target"]).ask(wanted["options"])
    except UserError as error:
        _say(answers, {"unusable": str(error)})
        return
    _say(answers, {"ready": True})
    for line in sys.stdin:
        _say(answers, _answer(ask, Sample(**json.loads(line))))
    asyncio.run(plugin.close(made))


def _answer(ask: Callable[[Sample], object], sample: Sample) -> dict[str, object]:
    try:
        return {"value": plain(ask(sample))}
    except TrajectoryRejected as rejected:
        return {"failed": rejected.reason, "detail": str(rejected).removeprefix(f"{rejected.reason}: ")[:SHOWN]}
    except Exception as error:  # noqa: BLE001  whatever a user's code raises is told to the controller
        return {"failed": reason_of(error, ERROR), "detail": said(error)}


def _say(answers: TextIO, what: dict[str, object]) -> None:
    print(json.dumps(what), file=answers)


if __name__ == "__main__":
    main()
