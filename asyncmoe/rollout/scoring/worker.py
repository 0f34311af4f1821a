"""A scoring process: one JSON line in, one JSON line out. `python -m asyncmoe.rollout.scoring.worker`.

First input line: {"target": "package.module:name", "options": {...}}; then one sample per line. First output line, once the target is
loaded: {"ready": true} or {"unusable": text}; then, per sample, {"value": ...} with the result of
`asyncmoe.rollout.scoring.plain_answer.plain`, or {"failed": reason, "detail": text}, or, if the target raised, {"failed": reason,
"raised": fields of `asyncmoe.rollout.scoring.raised.Raised`}. When standard input ends, the worker closes the
target's object.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict

from asyncmoe.errors import TrajectoryRejected, UserError
from asyncmoe.rollout import piped
from asyncmoe.rollout.scoring import plugin
from asyncmoe.rollout.scoring.plain_answer import plain
from asyncmoe.rollout.scoring.raised import raised_by
from asyncmoe.rollout.scoring.types import ERROR, SHOWN, Sample, reason_of


def main() -> None:
    """Score samples until standard input ends."""
    requests, say = piped.take()
    wanted = json.loads(requests.readline())
    try:
        found = plugin.find(wanted["target"])
        ask, made = found.ask(wanted["options"])
    except UserError as error:
        say({"unusable": str(error)})
        return
    say({"ready": True})
    for line in requests:
        say(_answer(found, ask, Sample(**json.loads(line))))
    asyncio.run(plugin.close(made))


def _answer(found: plugin.Loaded, ask: Callable[[Sample], object], sample: Sample) -> dict[str, object]:
    try:
        return {"value": plain(ask(sample))}
    except TrajectoryRejected as rejected:
        return {"failed": rejected.reason, "detail": str(rejected).removeprefix(f"{rejected.reason}: ")[:SHOWN]}
    except BaseException as error:  # noqa: BLE001  the controller receives every error of user code
        return {"failed": reason_of(error, ERROR), "raised": asdict(raised_by(error, found.function))}


if __name__ == "__main__":
    main()
