"""A server as `asyncmoe.platform.sglang` starts it, in which every update comes after the steps that a test wants. It keeps account of
streams. `python -m tests.engine.overlap_server FILE HOW <arguments>`.

FILE gets a line of JSON for every update: what was in flight. HOW: "settled" as it should be; "plain" for SGLang as it is, "unordered" for
the same with streams; "naive" for a step that is processed at the pause with nothing left in its place.

A pause that has arrived, or a command outside one, waits with all that came after it while the scheduler goes on, until what is in flight
is the case whose turn it is, `_PATIENCE` passes have gone by, or nothing is left to do.

A command to commit makes the output layer that of its version (`certain.head`): nothing is staged.

A write of weights that is not ordered behind the step in flight ends the server, and so does a step that is not ordered behind a write.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncmoe.platform.sglang import overlap
from asyncmoe.platform.sglang.patching import after_import
from asyncmoe.platform.sglang.receiver_command import CommitCommand, parse
from asyncmoe.weights import receiver
from tests.engine import streams
from tests.engine.certain import head

CASES = ("prefill, prefill", "prefill, decode", "decode, prefill", "decode, decode", "chunk", "last token", "already finished")
_PATIENCE = 300


class Steps:
    """What the scheduler has launched, and the pause that waits."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._modes: list[str] = []
        self._turn = count()
        self._case = CASES[next(self._turn)]
        self._waited = 0
        self._step: streams.Enqueued | None = None
        self._write: streams.Enqueued | None = None

    def launched(self, batch: Any) -> None:
        self._modes = [*self._modes[-1:], "prefill" if batch.forward_mode.is_extend() else "decode"]

    def forward(self) -> None:
        if self._write is not None and not self._write.before():
            raise RuntimeError("a step is not ordered behind the weights that were written")
        self._step = streams.enqueue()

    def write(self) -> None:
        if self._step is not None and not self._step.before():
            raise RuntimeError("weights are written while a step that reads them is in flight")
        self._write = streams.enqueue()

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
    """Have the scheduler tell `steps`."""

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

    def worker(module: ModuleType) -> None:
        _before(vars(module)["TpModelWorker"], "forward_batch_generation", steps.forward)

    def updater(module: ModuleType) -> None:
        for name in ("update_weights_from_distributed", "update_weights_from_tensor"):
            _before(vars(module)["SchedulerWeightUpdaterManager"], name, steps.write)

    after_import(overlap.MODULE, scheduler)
    after_import("sglang.srt.managers.tp_worker", worker)
    after_import("sglang.srt.managers.scheduler_components.weight_updater", updater)


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Stands in for `asyncmoe.weights.receiver.load`."""
    for text, _ in named_tensors:
        made = parse(text)
        assert isinstance(made, CommitCommand)
        weight = model.lm_head.weight.data
        new = head(made.version, model.config.vocab_size, weight.shape[1])
        weight[: len(new)].copy_(new)


def _before(owner: Any, name: str, look: Any) -> None:
    method = getattr(owner, name)

    def looked(self: Any, *arguments: Any, **named: Any) -> Any:
        look()
        return method(self, *arguments, **named)

    setattr(owner, name, looked)


def _naive(scheduler: Any) -> None:
    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())


SETTLE: dict[str, Callable[[Any], None]] = {
    "settled": overlap.settle,
    "plain": lambda scheduler: None,
    "unordered": lambda scheduler: None,
    "naive": _naive,
}

if __name__ == "__main__":
    _, file, how, *arguments = sys.argv
    overlap.settle = SETTLE[how]
    if how in ("settled", "unordered"):
        streams.install()
    watch(Steps(Path(file)))
    receiver.load = load
    sys.argv[1:] = arguments
    runpy.run_module("asyncmoe.platform.sglang.server", run_name="__main__", alter_sys=True)
