"""Two GPUs, of which this process was given the second: threads, addresses, contexts, and memory that runs out."""

from __future__ import annotations

import ast
import gc
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from device_standin import TOTAL, Machine, OnDevice1, build, on_device1
from test_receiver import HF, keep, terms

import asyncmoe
import asyncmoe.reshard.memory as memory_module
from asyncmoe.errors import OutOfDeviceMemory, WeightSyncError
from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.platform.sglang import receiver_command
from asyncmoe.reshard import Exchanger
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.transport import Lane, MessageLink
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import EngineRanks, Header, MeetingOutcome, Ready, Terms
from asyncmoe.weights.receiver import channel, failing, handshake, transfer_plan, worker
from asyncmoe.weights.receiver.channel import SideStream

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with")
PACKAGE = Path(asyncmoe.__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def machine(library: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(library)
    made.install(monkeypatch)
    return made


def in_thread(act: Callable[[], Any]) -> Any:
    """What it returns or raises in a new thread, of which the device is 0."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:  # noqa: BLE001  looked at by the test
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return found[0]


# ---------------------------------------------------------------- addresses


def test_an_address_does_not_depend_on_the_current_device(machine: Machine) -> None:
    tensor = on_device1(3, 4)
    found = in_thread(lambda: memory_module.memory_of(tensor, "w"))
    assert found == memory_module.Memory(tensor.data_ptr(), 48, "float32", "cuda:1", tuple(tensor.shape))
    assert machine.contexts == set()


class Foreign:
    """Another library's array on device 1, which exports what is on the current device only."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.values = machine, torch.zeros(5)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1

    def __dlpack__(self, stream: int | None = None) -> Any:
        if self._machine.current != 1:
            raise BufferError("on another device")
        return self.values.__dlpack__()


def test_another_librarys_array_is_asked_for_on_its_own_device(machine: Machine) -> None:
    array = Foreign(machine)
    assert in_thread(lambda: memory_module.memory_of(array, "w")).address == array.values.data_ptr()
    assert machine.contexts == {1}


# ---------------------------------------------------------------- contexts


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


# ---------------------------------------------------------------- memory that runs out


def test_memory_is_asked_for_again_after_torch_gave_back_what_it_keeps(machine: Machine) -> None:
    machine.reset(free=100)
    machine.on_relief = lambda: machine.reset(free=10_000)
    assert Gpu(1, torch.cuda.empty_cache).allocate(5000).nbytes == 5000
    assert machine.relieved == 1


def test_memory_that_runs_out_is_named(machine: Machine) -> None:
    machine.reset(free=100 << 20)
    with pytest.raises(OutOfDeviceMemory) as caught:
        Gpu(1, torch.cuda.empty_cache).allocate(500 << 20)
    assert str(caught.value).startswith("memory of cuda:1 for messages: got 0.10 GiB free of 1.00 GiB, expected 0.49 GiB; ")
    for key in ("engines.max_total_tokens", "--mem-fraction-static", "sync.bucket_bytes"):
        assert key in str(caught.value)
    assert machine.relieved == 1


# ---------------------------------------------------------------- the exchange thread


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
    link = MessageLink(transport, [lane], [lane], 2, threaded=True)
    for number in range(2):
        link.close_round(number, 5)
    link.finish(5)
    link.close()
    assert transport.devices == {1}


# ---------------------------------------------------------------- a receiver


class Model(torch.nn.Module):
    """With parameters of device 1."""

    def __init__(self, agreed: Terms) -> None:
        super().__init__()
        self._held = {}
        for name, storage in transfer_plan.engine_layouts(agreed)[0].storages.items():
            self._held[name] = torch.nn.Parameter(on_device1(*storage.shape), requires_grad=False)

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._held.items())

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._held.values())


class Stage:
    """A receiver on device 1, and rank 0 of the trainer, on the same device, in this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handshake, "places", lambda: {"tp_rank": 0, "moe_ep_rank": 0})
        monkeypatch.setattr(handshake, "obstacles", lambda _: [])
        self.store, where = keep()
        self.terms = msgspec.structs.replace(terms((EngineRanks("engine.0", 1, 1, 1),)), transport="ipc")
        self.store.put(protocol.TERMS, self.terms)
        self.model = Model(self.terms)
        join = receiver_command.JoinCommand(*where, "test", 1)
        worker.obey(self.model, msgspec.json.encode(join).decode())

    def ready(self) -> Ready:
        return self.store.get(protocol.ready(1), 10.0)

    def send(self, number: int, value: float) -> str:
        """All weights have `value`; what the receiver says of it."""
        storages = family_of(HF).megatron_layout(HF, MegatronParallel(), 0, "float32").storages
        tensors = {name: torch.full(storage.shape, value).as_subclass(OnDevice1) for name, storage in storages.items()}
        side = SideStream(torch.device("cuda", 1))
        self.store.put(protocol.header(number), Header(10 * number, number))
        try:
            exchanger: Exchanger = channel.connect(self.store, self.terms, transfer_plan.route(self.terms, 0), number, side)
        except WeightSyncError as error:
            return str(error)
        exchanger.bind(tensors)
        exchanger.run(10.0)
        return self.store.get(protocol.staged(number, 1), 10.0).failure


@pytest.fixture
def stage(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Stage:
    machine.call("swap", 1)  # as SGLang's worker has its main thread
    return Stage(monkeypatch)


def test_a_receiver_on_device_1_receives_and_commits(machine: Machine, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    made_in: list[object] = []
    real = torch.empty_like
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(float(next(stage.model.parameters()).mean())))

    def empty_like(*args: Any, **kwargs: Any) -> Any:
        made_in.append(torch.cuda.current_stream())
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    card = stage.ready().card
    assert card is not None
    assert (card.device, card.wanted, card.copy) == ("cuda:1", 0, sum(p.nbytes for p in stage.model.parameters()))
    stage.store.put(protocol.VERDICT, MeetingOutcome())
    assert stage.send(1, 7.0) == ""
    assert not any(p.any() for p in stage.model.parameters())
    assert made_in
    assert set(made_in) == {worker._receivers[stage.model]._side.stream}  # type: ignore[union-attr]
    worker.obey(stage.model, msgspec.json.encode(receiver_command.CommitCommand(10, 1)).decode())
    norm = stage.model._held["model.norm.weight"]
    assert (norm == 7).all()
    assert waits[0] == 0, "a commit waits for what reads the weights before it writes them"
    assert waits[-1] != 0, "a commit returns when its copies are done"
    assert machine.contexts == {1}


def test_a_receiver_without_room_tells_everyone_the_cause_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 GiB. GPU 1 has 12.00 GiB free.\nMore words.")

    stage.ready()
    stage.store.put(protocol.VERDICT, MeetingOutcome())
    monkeypatch.setattr(torch, "empty_like", none_left)
    begin = time.monotonic()
    said = stage.send(1, 7.0)
    assert time.monotonic() - begin < 2
    assert said.startswith("out of memory: CUDA out of memory. Tried to allocate 30.00 GiB. GPU 1 has 12.00 GiB free.; leave more")
    assert "sync.bucket_bytes" in said
    assert "(engine.0 rank 1" not in said
    assert "(engine.0 rank 0 on " in said
    assert said.endswith("cuda:1)")
    monkeypatch.undo()


@pytest.mark.parametrize("where", ["planning", "verdict", "serving"])
def test_whatever_ends_a_receiver_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    if where == "planning":
        monkeypatch.setattr(worker.Weights, "described", broken)
    machine.call("swap", 1)
    stage = Stage(monkeypatch)
    if where == "planning":
        assert stage.ready().failure == "RuntimeError: CUDA error: an illegal memory access was encountered"
        return
    stage.ready()
    if where == "serving":
        monkeypatch.setattr(worker.Receiver, "_drop", broken)
        stage.store.put(protocol.VERDICT, MeetingOutcome())
        said = stage.send(1, 1.0)
    else:
        stage.store._store.set("verdict", b"no message")
        began = time.monotonic()
        while not stage.store.has(protocol.FAILED) and time.monotonic() - began < 5:
            time.sleep(0.01)
        said = stage.store.resigned()
    assert "(engine.0 rank 0 on " in said
    assert "illegal memory access" in said or "Error" in said


# ---------------------------------------------------------------- the meeting


def test_out_of_memory_is_the_cause_of_what_nccl_and_waits_say() -> None:
    said = {
        "trainer rank 0": "from trainer rank 0 to engine.0 rank 1: NCCL: remote process exited or there was a network error (on a)",
        "trainer rank 1": "waited 3.0 s for engine.0 rank 1: its message (trainer rank 1 on a)",
        "engine.0 rank 1": "out of memory: CUDA out of memory. Tried to allocate 30 GiB (engine.0 rank 1 on b, cuda:1)",
    }
    assert failing.cause(said).startswith("out of memory")


# ---------------------------------------------------------------- the sending thread


def test_the_sending_thread_of_a_trainer_rank_on_device_1(library: Path) -> None:
    script = Path(__file__).with_name("device_sender.py")
    done = subprocess.run([sys.executable, str(script), str(library)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.split("\n")[:2] == ["sent on cuda:1, contexts [1]", "told"]


# ---------------------------------------------------------------- who may start a thread


class Starts(ast.NodeVisitor):
    """Threads that a module starts by itself."""

    MAKERS: ClassVar = {"Thread", "ThreadPoolExecutor", "Timer", "start_new_thread", "to_thread"}

    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit_Call(self, node: ast.Call) -> None:
        if _last(node.func) in self.MAKERS:
            self.lines.append(node.lineno)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(_last(base) in self.MAKERS for base in node.bases):
            self.lines.append(node.lineno)
        self.generic_visit(node)


def _last(name: ast.expr) -> str:
    return name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""


ALLOWED = {
    "reshard/device_threads.py": 2,
    "trainer/data/microbatches.py": 1,  # packs in host memory; whoever takes a micro-batch moves it to the device
    "trainer/model/checkpoint_saver.py": 1,  # writes what Megatron has copied to host memory
}
"""Of the packages that touch devices. Another entry says in a comment why its thread never does."""


def test_threads_that_may_touch_a_device_start_in_one_place() -> None:
    found = {}
    for package in ("trainer", "weights", "reshard"):
        for path in sorted((PACKAGE / package).rglob("*.py")):
            starts = Starts()
            starts.visit(ast.parse(path.read_text()))
            if starts.lines:
                found[str(path.relative_to(PACKAGE))] = len(starts.lines)
    assert found == ALLOWED


def test_the_search_for_threads_finds_them() -> None:
    starts = Starts()
    starts.visit(ast.parse("import threading\nthreading.Thread(target=f)\nThreadPoolExecutor(1)\nclass A(threading.Thread): ...\n"))
    assert starts.lines == [2, 3, 4]
