"""A server like that of `asyncmoe.platform.sglang`, in which every update comes after the steps that a test chooses.
`python -m tests.engine.overlap_server FILE <arguments>`.

FILE gets a line of JSON for every update: the requests in flight.

A pause that has arrived, or a command outside one, waits with all that came after it while the scheduler goes on, until what is in flight
is the case whose turn it is, `_PATIENCE` passes have gone by, or nothing is left to do.

A command to commit makes the output layer that of its version (`certain.head`): nothing is staged.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncmoe.platform.sglang import overlap
from asyncmoe.platform.sglang.patching import after_import
from asyncmoe.platform.sglang.receiver_command import parse
from asyncmoe.weights import receiver
from tests.engine.certain import head

CASES = ("prefill, prefill", "prefill, decode", "decode, prefill", "decode, decode", "chunk", "last token", "already finished")
_PATIENCE = 300


class Steps:
    """The steps that the scheduler has launched, and the waiting pause."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._modes: list[str] = []
        self._turn = count()
        self._case = CASES[next(self._turn)]
        self._waited = 0

    def launched(self, batch: Any) -> None:
        self._modes = [*self._modes[-1:], "prefill" if batch.forward_mode.is_extend() else "decode"]

    def may_pause(self, scheduler: Any) -> bool:
        found = self._in_flight(scheduler)
        self._waited += 1
        if self._case not in found and self._waited < _PATIENCE and (found or scheduler.waiting_queue):
            return False
        with self._file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        self._case, self._waited = CASES[next(self._turn) % len(CASES)], 0
        return True

    def _in_flight(self, scheduler: Any) -> list[str]:
        entries = [batch for batch, _ in scheduler.result_queue if batch.reqs]
        if not entries:
            return []
        batch, chunked = entries[-1], scheduler.chunked_req
        alive = [request for request in batch.reqs if not request.finished()]
        found = [", ".join(self._modes)]
        if chunked is not None and chunked in batch.reqs:
            found.append("chunk")
        if any(request.next_output_finishes_by_length() for request in alive if request is not chunked):
            found.append("last token")
        if len(alive) < len(batch.reqs):
            found.append("already finished")
        return found


def watch(steps: Steps) -> None:
    """Make the scheduler report to `steps`."""

    def scheduler(module: ModuleType) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput, UpdateWeightsFromTensorReqInput

        found = vars(module)["Scheduler"]
        process, run = found.process_input_requests, found.run_batch
        updates = (PauseGenerationReqInput, UpdateWeightsFromTensorReqInput)

        def process_input_requests(self: Any, requests: list[Any]) -> None:
            first = next((at for at, request in enumerate(requests) if isinstance(request, updates)), len(requests))
            process(self, requests[:first])
            if first == len(requests):
                return
            if self._engine_paused or steps.may_pause(self):
                process(self, requests[first : first + 1])
                process_input_requests(self, requests[first + 1 :])
            else:
                self._deferred_input_requests[:0] = requests[first:]

        def run_batch(self: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
            steps.launched(batch)
            return run(self, batch, *arguments, **named)

        found.process_input_requests, found.run_batch = process_input_requests, run_batch

    after_import(overlap.MODULE, scheduler)


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Stands in for `asyncmoe.weights.receiver.load`."""
    for text, _ in named_tensors:
        made = parse(text)
        weight = model.lm_head.weight.data
        new = head(made.version, model.config.vocab_size, weight.shape[1])
        weight[: len(new)].copy_(new)


if __name__ == "__main__":
    _, file, *arguments = sys.argv
    watch(Steps(Path(file)))
    receiver.load = load
    sys.argv[1:] = arguments
    runpy.run_module("asyncmoe.platform.sglang.server", run_name="__main__", alter_sys=True)
