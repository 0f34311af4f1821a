"""Weights that are committed while a step of the overlap schedule is in flight: it reads the old ones, the next step the new ones.

The scheduler here is a stand-in with the streams of SGLang's: steps run on a forward stream that waits for the stream on which the
scheduler, and so a commit, enqueues (sglang 0.5.23, `Scheduler.run_batch`, `run_event_loop`); results are copied on a third.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from asyncmoe.platform.sglang import overlap  # noqa: E402
from asyncmoe.weights.receiver.weight_buffers import Weights  # noqa: E402

SLEEP_CYCLES = 200_000_000
"""About a tenth of a second, in which a step has begun and has not read its weights."""


class Scheduler:
    """Its steps sample the first weight of a model.

    Args:
        waits: whether processing a result waits for it, as SGLang's does.
    """

    def __init__(self, waits: bool = True) -> None:
        self.enable_overlap, self.disaggregation_mode, self.device_module = True, SimpleNamespace(value="null"), torch.cuda
        self.schedule_stream, self.forward_stream, self.copy_stream = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
        self.model = torch.nn.Linear(1024, 1024, bias=False, device="cuda").requires_grad_(False)
        self.model.weight.fill_(1.0)
        # What allocates memory may wait for the device.
        self.staged = {"weight": torch.full_like(self.model.weight, 2.0)}
        torch.cuda.synchronize()
        self.result_queue: deque[Any] = deque()
        self.waits = waits
        self.sampled: list[Any] = []

    def launch(self) -> None:
        self.forward_stream.wait_stream(self.schedule_stream)
        out = torch.empty(1, pin_memory=True)
        done = torch.cuda.Event()
        with torch.cuda.stream(self.forward_stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            read = self.model.weight[0, :1].clone()
        self.copy_stream.wait_stream(self.forward_stream)
        with torch.cuda.stream(self.copy_stream):
            read.record_stream(self.copy_stream)
            out.copy_(read, non_blocking=True)
            done.record()
        self.result_queue.append((SimpleNamespace(reqs=["a request"]), (out, done)))

    def process_batch_result(self, batch: Any, result: Any) -> None:
        out, done = result
        if self.waits:
            done.synchronize()
        self.sampled.append(out)

    def commit(self) -> None:
        """As a receiver does, on the stream of the scheduler's thread."""
        Weights(self.model).commit(self.staged)

    def read(self) -> list[float]:
        while self.result_queue:
            batch, result = self.result_queue.popleft()
            if batch.reqs:
                self.process_batch_result(batch, result)
        torch.cuda.synchronize()
        return [float(out) for out in self.sampled]


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "ordering"])
def test_the_step_in_flight_reads_the_old_weights(waits: bool) -> None:
    scheduler = Scheduler(waits)
    with torch.cuda.stream(scheduler.schedule_stream):
        scheduler.launch()
        overlap.settle(scheduler)
        scheduler.commit()
        scheduler.launch()
        assert scheduler.read() == [1.0, 2.0]


def test_unsettled_it_reads_the_new_ones() -> None:
    """What the test above would miss if the step were too short."""
    scheduler = Scheduler()
    with torch.cuda.stream(scheduler.schedule_stream):
        scheduler.launch()
        scheduler.commit()
        scheduler.launch()
        assert scheduler.read() == [2.0, 2.0]
