"""Makes SGLang's overlap schedule exact when weights change during generation.

With the overlap schedule the scheduler launches a step before it processes the tokens sampled by the previous step (sglang 0.5.23,
`managers/scheduler.py`, `Scheduler.event_loop_overlap`); one step's batch and result wait in `result_queue`. A pause in place leaves them
there, so tokens sampled by the old weights are counted after the new version is recorded, and are attributed to it; and on a GPU the step
may still run while parameters are written. With this patch a pause in place, and every change of version, first settles that step; so does
a command (`commands.py`).

The loop pops an entry for every step that it launched, so a settled step leaves a dummy entry without requests.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MODULE = "sglang.srt.managers.scheduler"
OFF = "--disable-overlap-schedule"
KNOWN = "cb8f6de62ad1e200df34114cbcffec747e16d667eddbc719ccb9052723e8b4e5"
"""SHA-256 of `managers/scheduler.py` of sglang 0.5.23, for which `settle` was written."""


@lru_cache
def obstacle() -> str:
    """Return in one line why the overlap schedule must stay off with the installed SGLang; empty if it may be on."""
    found: Any = importlib.util.find_spec("sglang")
    path = Path(found.submodule_search_locations[0], *MODULE.split(".")[1:]).with_suffix(".py")
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"{path.name} of sglang cannot be read: {error}"
    return "" if digest == KNOWN else f"sglang's {path.name} is not that of 0.5.23"


def checked(arguments: Sequence[str]) -> list[str]:
    """Return a server's arguments; if the installed SGLang is not the known one, add `OFF` and log the reason."""
    if OFF in arguments or not (reason := obstacle()):
        return [*arguments]
    print(f"the overlap schedule is off: {reason}", flush=True)
    return [*arguments, OFF]


def settle(scheduler: Any) -> None:
    """Process the tokens of the step in flight, if there is one, so that later writes of weights come after it.

    Call it between two iterations of the scheduler's loop. `process_batch_result` waits for the copies of the result and so for the step.
    In addition, the current stream, on which weights are written, is ordered after the stream of the steps.
    """
    if not scheduler.enable_overlap or scheduler.disaggregation_mode.value != "null":
        return
    queue = scheduler.result_queue
    entries = list(queue)
    queue.clear()
    for batch, result in entries:
        scheduler.process_batch_result(batch, result)
    queue.extend([_SETTLED] * len(entries))
    scheduler.device_module.current_stream().wait_stream(scheduler.forward_stream)


# The entry has no requests, because `Scheduler._reqs_finishing_inflight` counts one more token for the requests of an entry, and excludes a
# request forever if that token is its last.
_SETTLED = (SimpleNamespace(reqs=[], has_grammar=False), SimpleNamespace(grammar_advanced=True))


def _mend(module: ModuleType) -> None:
    """Make the scheduler settle steps. No effect without the overlap schedule."""
    if obstacle():
        return  # `checked` has switched the overlap schedule off
    scheduler: Any = vars(module)["Scheduler"]
    scheduler.pause_generation = _settled_first(scheduler.pause_generation, lambda request: request.mode == "in_place")
    scheduler.record_weight_version_change = _settled_first(scheduler.record_weight_version_change, lambda new_version: bool(new_version))
    process = scheduler.process_batch_result

    @wraps(process)
    def process_batch_result(self: Any, batch: Any, result: Any) -> Any:
        return None if result is _SETTLED[1] else process(self, batch, result)

    scheduler.process_batch_result = process_batch_result


def _settled_first(method: Callable[..., Any], needed: Callable[..., bool]) -> Callable[..., Any]:
    @wraps(method)
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        if needed(*arguments, **named):
            settle(self)
        return method(self, *arguments, **named)

    return wrapped


PATCHES = {MODULE: _mend}
