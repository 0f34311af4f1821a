"""Two GPUs, of which this process was given the second: threads, addresses, contexts, and memory that runs out."""

from __future__ import annotations

import gc
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delta_meeting import Rig, fine
from device_standin import TOTAL, Machine, machine, on_device1
from test_delta_updates_gpu import rig

import asyncmoe
import asyncmoe.reshard.memory as memory_module
from asyncmoe.errors import OutOfDeviceMemory, WeightSyncError
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, LocalTransport, plan
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.transport import Lane, MessageLink
from asyncmoe.weights import protocol
from asyncmoe.weights.receiver.channel import HOST
from asyncmoe.weights.sender.publisher import Published
from asyncmoe.weights.sender.reshard import ReshardPublisher

__all__ = ["machine", "rig"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")
PACKAGE = Path(asyncmoe.__file__).parent


@pytest.fixture(autouse=True)
def reset(machine: Machine) -> None:
    machine.reset()
    machine.relieved = 0


def in_thread(act: Callable[[], Any]) -> Any:
    """What it returns in a new thread, of which the device is 0."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(act).result(30)


def test_an_address_does_not_depend_on_the_current_device(machine: Machine) -> None:
    tensor = on_device1(3, 4)
    found = in_thread(lambda: memory_module.memory_of(tensor, "w"))
    assert found == memory_module.Memory(tensor.data_ptr(), 48, "float32", "cuda:1", tuple(tensor.shape))
    assert machine.contexts == set()


def test_a_process_of_device_1_makes_no_context_on_device_0(machine: Machine) -> None:
    """In a thread that chose no device: everything there is, and the ends of it, which come in any thread."""

    def use() -> None:
        gpu = Gpu(1)
        buffer, event, stream = gpu.allocate(512), gpu.event(), gpu.stream()
        with gpu.current():
            assert machine.current == 1
        event.record(stream.handle)
        assert event.done()
        assert gpu.open(gpu.share(buffer), 512).address == buffer.address

    assert in_thread(use) is None
    in_thread(gc.collect)
    assert machine.contexts == {1}
    assert machine.free(1) == TOTAL


def test_a_thread_that_uses_another_device_gets_it_back(machine: Machine) -> None:
    def use() -> int:
        machine.call("swap", 0)
        Gpu(1).allocate(512)
        with Gpu(1).current():
            pass
        return machine.current

    assert in_thread(use) == 0
    assert machine.contexts == {0, 1}


def test_memory_that_runs_out_is_asked_for_again_and_then_named(machine: Machine) -> None:
    machine.reset(free=100)
    machine.on_relief = lambda: machine.reset(free=10_000)
    assert Gpu(1, torch.cuda.empty_cache).allocate(5000).nbytes == 5000
    machine.on_relief = lambda: None
    machine.reset(free=100 << 20)
    with pytest.raises(OutOfDeviceMemory) as caught:
        Gpu(1, torch.cuda.empty_cache).allocate(500 << 20)
    for words in ("cuda:1", "0.10 GiB free of 1.00 GiB", "0.49 GiB", "sync.bucket_bytes"):
        assert words in str(caught.value)
    assert machine.relieved == 2


class Recording:
    """A transport between GPUs that waits, as NCCL's does."""

    rank, waits = 0, True

    def __init__(self, machine: Machine) -> None:
        self._machine, self._gpu, self.devices = machine, Gpu(1), set[int]()

    def empty(self, nbytes: int) -> Any:
        return self._gpu.allocate(nbytes)

    def exchange(self, sends: Any, receives: Any, timeout_s: float) -> None:
        self.devices.add(self._machine.current)


def test_rounds_are_exchanged_on_the_device_of_their_messages(machine: Machine) -> None:
    transport, lane = Recording(machine), Lane(1, (24, 24), 24)
    link = MessageLink(transport, [lane], [lane], 2)
    for number in range(2):
        link.close_round(number, 5)
    link.finish(5)
    link.close()
    assert transport.devices == {1}


# ---------------------------------------------------------------- receivers on device 1, and a sender


def test_a_receiver_on_device_1_receives_and_commits(machine: Machine, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real, waits, made_in = torch.empty_like, list[list[str]](), set[object]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(rig.wrong))

    def empty_like(*args: Any, **kwargs: Any) -> Any:
        made_in.add(torch.cuda.current_stream())
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    for rank, model in rig.workers.items():
        card = rig.senders[0].met.store.get(protocol.ready(rank), 1.0).card
        assert (card.device, card.wanted, card.copy) == ("cuda:1", 0, sum(p.nbytes for p in model.parameters()))
    rig.before_commit = lambda: waits.append(rig.wrong)
    assert fine(rig.send(1))
    assert waits[0], "nothing is written before the commit"
    assert waits[1] == waits[0], "a commit waits for what reads the weights before it writes them"
    assert waits[-1] == rig.wrong == [], "a commit returns when its copies are done"
    assert made_in == {receiver._side.stream for receiver in rig.receivers if receiver._side.stream}
    assert machine.contexts == {1}


def test_a_receiver_without_room_tells_everyone_the_cause(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 GiB.\nMore words.")

    monkeypatch.setattr(torch, "empty_like", none_left)
    (said,) = {str(one) for one in rig.send(1)}
    monkeypatch.undo()
    assert re.fullmatch(r"out of memory: CUDA out of memory. Tried .* 30.00 GiB.; .*sync\.bucket_bytes.*\(engine.*, cuda:1\)", said)


class OneRank(ReshardPublisher):
    """Of which only the sending is real; nobody is met."""

    def __init__(self, act: Callable[[], None]) -> None:
        mesh = SimpleNamespace(device=torch.device("cuda", 1), rank=0, world=1)
        vars(self).update(_model=SimpleNamespace(mesh=mesh), _expected=SimpleNamespace(of_next=lambda: ()), _act=act)
        sections = {"engines": SimpleNamespace(start_timeout_s=5.0), "sync": SimpleNamespace(timeout_s=5.0)}
        vars(self).update(_config=SimpleNamespace(**sections))
        vars(self).update(_sources=SimpleNamespace(refresh=lambda: None), _side=HOST)
        self._settling, self._sent, self._hold = threading.Event(), threading.Event(), threading.Lock()

    def _publish(self, version: int, expected: Any) -> Published | None:
        self._act()  # type: ignore[attr-defined]
        return Published(version, 0.0, 0.0)


def test_the_sending_thread_of_a_trainer_rank_on_device_1(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncmoe.weights.sender.reshard.yield_cores", lambda: None)
    builder = LayoutBuilder(0, "float32")
    builder.stack("w", [("w", Box((0, 0), (4, 8)))])
    layout, source, target = builder.build(), on_device1(4, 8), on_device1(4, 8)
    source.fill_(3.0)

    def send() -> None:
        with Exchanger(plan({"w": (4, 8)}, [layout], [layout]), LocalTransport()) as exchanger:
            exchanger.bind({"w": source}, {"w": target})
            exchanger.run()

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    sender = OneRank(send)
    sender.begin(1)
    assert sender.settle() is not None
    assert (target == 3).all()
    gc.collect()
    assert machine.contexts == {1}
    sender = OneRank(fail)
    sender.begin(2)
    with pytest.raises(WeightSyncError, match=r"^out of memory: .*sync\.bucket_bytes.*\(trainer rank 0 on .*, cuda:1\)"):
        sender.settle()


ALLOWED = {
    "reshard/device_threads.py": 2,
    "trainer/data/microbatches.py": 1,  # packs in host memory; whoever takes a micro-batch moves it to the device
    "trainer/model/checkpoint_saver.py": 1,  # writes what Megatron has copied to host memory
}
"""Of the packages that touch devices. Another entry says in a comment why its thread never does."""


def test_threads_that_may_touch_a_device_start_in_one_place() -> None:
    started = re.compile(r"\b(Thread|ThreadPoolExecutor|Timer|start_new_thread|to_thread)\(|\((threading\.)?(Thread|ThreadPoolExecutor)\):")
    paths = [path for package in ("trainer", "weights", "reshard") for path in sorted((PACKAGE / package).rglob("*.py"))]
    found = {str(path.relative_to(PACKAGE)): len(started.findall(path.read_text())) for path in paths}
    assert {name: count for name, count in found.items() if count} == ALLOWED
