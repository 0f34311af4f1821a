"""Makes SGLang's overlap schedule exact when weights change during generation.

With the overlap schedule the scheduler launches a step before it processes the tokens sampled by the previous step (sglang 0.5.23,
`managers/scheduler.py`, `Scheduler.event_loop_overlap`); one step's batch and result wait in `result_queue`. A pause in place leaves them
there, so tokens sampled by the old weights are counted after the new version is recorded, and are attributed to it; and on a GPU the step
may still run while parameters are written. With this patch a pause in place, and every change of version, first settles that step; so does
a command (`commands.py`).

The loop pops an entry for every step that it launched, so a settled step leaves a dummy entry without requests.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from asyncmoe.platform.sglang.patching import after_import

MODULE = "sglang.srt.managers.scheduler"
OFF = "--disable-overlap-schedule"
_QUEUE = "result_queue"
_RELIED_ON = (
    "_dispatch_event_loop_once",
    "Scheduler.run_event_loop",
    "Scheduler.ingest_requests",
    "Scheduler.run_batch",
    "Scheduler.launch_batch_sample_if_needed",
    "Scheduler.process_batch_result",
    "Scheduler.get_next_batch_to_run",
    "Scheduler.pause_generation",
    "Scheduler.continue_generation",
    "Scheduler.record_weight_version_change",
)
"""Functions that settling relies on, in addition to every function that uses `result_queue`."""

KNOWN: Mapping[str, str] = {
    "Scheduler._advance_pending_grammar": "d9c9047ecf83",
    "Scheduler._collect_inflight_batches": "2eedddc21a81",
    "Scheduler._reqs_finishing_inflight": "f1e75598a082",
    "Scheduler.continue_generation": "5d6d1a88e9a3",
    "Scheduler.event_loop_overlap": "9c160c9f9aaa",
    "Scheduler.get_next_batch_to_run": "89e3176bd984",
    "Scheduler.ingest_requests": "ad10134904e3",
    "Scheduler.init_overlap": "c47bfeca9bfe",
    "Scheduler.init_running_status": "46854ae5194e",
    "Scheduler.is_disable_overlap_for_batch": "9bd4677def9a",
    "Scheduler.is_fully_idle": "66f0794b5c9b",
    "Scheduler.launch_batch_sample_if_needed": "61f9422d396d",
    "Scheduler.pause_generation": "00cbcd11ca6a",
    "Scheduler.process_batch_result": "98ba1006adfa",
    "Scheduler.record_weight_version_change": "03787fc11966",
    "Scheduler.run_batch": "c95dbca10896",
    "Scheduler.run_event_loop": "02edf60f593a",
    "_dispatch_event_loop_once": "4220153895a2",
}
"""Fingerprints by function in sglang 0.5.23, for which `settle` was written."""


@lru_cache
def obstacle() -> str:
    """Return in one line why the overlap schedule must stay off with the installed SGLang; empty if it may be on."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return "sglang: got no installed package"
    path = Path(found.submodule_search_locations[0], *MODULE.split(".")[1:]).with_suffix(".py")
    try:
        differs = differences(fingerprints(path.read_text()))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return f"{path.name} of sglang cannot be read: {error}"
    return f"sglang's {path.name} differs from 0.5.23's in {', '.join(differs)}" if differs else ""


def checked(arguments: Sequence[str]) -> list[str]:
    """Return a server's arguments; if the installed SGLang is not the known one, add `OFF` and log the reason."""
    if OFF in arguments or not (reason := obstacle()):
        return [*arguments]
    print(f"the overlap schedule is off: {reason}", flush=True)
    return [*arguments, OFF]


def fingerprints(source: str) -> dict[str, str]:
    """Compute the fingerprints of the functions that settling relies on.

    Args:
        source: source text of sglang.srt.managers.scheduler.

    Returns:
        {"Scheduler.run_batch": 12 hexadecimal digits}, independent of the function's comments and indentation.

    Raises:
        SyntaxError: `source` is not Python.
    """
    lines, found = source.splitlines(), {}
    for name, node in _functions(ast.parse(source)):
        text = [line.strip() for line in lines[node.lineno - 1 : node.end_lineno]]
        code = "\n".join(line for line in text if line and not line.startswith("#"))
        if name in _RELIED_ON or _QUEUE in code:
            found[name] = hashlib.sha256(code.encode()).hexdigest()[:12]
    return found


def differences(found: Mapping[str, str], known: Mapping[str, str] = KNOWN) -> list[str]:
    """Return the functions that have changed, are gone, or are new."""
    return sorted(name for name in {*found, *known} if found.get(name) != known.get(name))


def install() -> None:
    """Make the scheduler settle steps. Call it in every process before the import; it changes nothing without the overlap schedule."""
    after_import(MODULE, _mend)


def settle(scheduler: Any) -> None:
    """Count the tokens of the step in flight, if there is one, so that subsequent writes of weights come after it.

    Call it between two iterations of the scheduler's loop. `process_batch_result` waits for the copies of the result and so for the step.
    Even so, the current stream, on which weights are written, is ordered after the stream of the steps.
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


# No requests, because `Scheduler._reqs_finishing_inflight` counts one more token for the requests of an entry, and excludes a request
# forever if that token is its last.
_SETTLED = (SimpleNamespace(reqs=[], has_grammar=False), SimpleNamespace(grammar_advanced=True))


def _mend(module: ModuleType) -> None:
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


def _functions(module: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """Return all functions of a module and of its classes, by qualified name."""
    found = [(node.name, node) for node in module.body if isinstance(node, ast.FunctionDef)]
    for owner in module.body:
        if isinstance(owner, ast.ClassDef):
            found += [(f"{owner.name}.{node.name}", node) for node in owner.body if isinstance(node, ast.FunctionDef)]
    return found
