"""The weight receiver and what it shares with the sender: commands, handshake, plans, buffers, the store, and updates without SGLang."""

from __future__ import annotations

import base64
import math
import pickle
import pickletools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec
import pytest
import torch
from delta_meeting import Rig, bits, fine, meetings
from model_cases import MODELS

from asyncmoe.errors import AsyncmoeError, InvariantBroken, LayoutError, ProtocolError, TransferError, WaitTimeout, WeightSyncError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.lora.adapter import Kind, halves
from asyncmoe.models.payload import Payload
from asyncmoe.platform.sglang import receiver_command
from asyncmoe.reshard import plan
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import EngineRanks, Header, Outcome, Ready, Terms
from asyncmoe.weights.receiver import channel, failing, handshake, hosting, transfer_plan, worker
from asyncmoe.weights.receiver.control_store import Store
from asyncmoe.weights.receiver.weight_buffers import AdapterMemory, Weights

HF = MODELS["qwen3_moe"]
FAMILY = family_of(HF)


def terms(engines: tuple[EngineRanks, ...], trainer: MegatronParallel | None = None) -> Terms:
    sizes = trainer or MegatronParallel()
    return Terms(HF, None, sizes, engines, "float32", "float32", "shm", secrets.token_hex(8), 20_000, 20.0)


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("said", [receiver_command.JoinCommand("127.0.0.1", 4242, "weights", 3), receiver_command.CommitCommand(17, 3)])
def test_a_command_passes_through_what_sglang_lets_through(said: receiver_command.Command) -> None:
    pickled = base64.b64decode(receiver_command.payload(said))
    names = [str(value) for _, value, _ in pickletools.genops(pickled) if isinstance(value, str)]
    assert {"types", "SimpleNamespace", "builtins", "str"} <= set(names)
    ((text, tensor),) = pickle.loads(pickled)  # noqa: S301  our own
    tensor.to(0)
    assert receiver_command.parse(text) == said


@pytest.mark.parametrize("text", ["", "{}", '{"type":"Leave"}', '{"type":"Commit","version":"x","update":1}'])
def test_what_is_not_a_command_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="weight command"):
        receiver_command.parse(text)


# ---------------------------------------------------------------- handshake

ENGINE = EngineRanks("engine.0", 2, 2, 1)
LAYOUT = FAMILY.sglang_layout(HF, EngineParallel(2, 2), 1, "float32")
W2 = "model.layers.2.mlp.experts.w2_weight"


def fitting(**changes: Any) -> Ready:
    module = torch.nn.Module()
    for name, storage in LAYOUT.storages.items():
        module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.zeros(storage.shape)))
    found = {name.replace("/", "."): value for name, value in Weights(module).described().items()}
    return msgspec.structs.replace(Ready(parameters=found, places={"tp_rank": 1, "moe_ep_rank": 1, "attn_dp_rank": 0}), **changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": (1, 2, 3)}, "[1, 2, 3]"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"stride": (1, 2, 3)}, "[1, 2, 3]"),
        ({"shares": "a"}, "of a"),
    ],
)
def test_a_parameter_that_differs_is_named(change: dict[str, Any], said: str) -> None:
    ready = fitting()
    assert handshake.differences(ready, ENGINE, 1, LAYOUT) == []
    parameters = ready.parameters | {W2: msgspec.structs.replace(ready.parameters[W2], **change)}
    (line,) = handshake.differences(fitting(parameters=parameters), ENGINE, 1, LAYOUT)
    assert line.startswith(f"engine.0 rank 1: {W2}: got ")
    assert said in line.split(", expected float32")[0]


def test_parameters_that_are_missing_or_unknown_ranks_and_obstacles_are_named() -> None:
    known = fitting().parameters
    parameters = {name: p for name, p in known.items() if name != W2} | {"extra": known[W2]}
    ready = fitting(parameters=parameters, places={"tp_rank": 1, "moe_ep_rank": 0, "attn_dp_rank": 1}, obstacles=("it quantises",))
    wrong = handshake.differences(ready, ENGINE, 1, LAYOUT)
    ranks = "moe_ep_rank 0, expected 1", "attn_dp_rank 1, expected 0"
    for line, words in zip(wrong, (*ranks, "it quantises", "extra: got float32", f"{W2}: got no such"), strict=True):
        assert line.startswith("engine.0 rank 1")
        assert words in line
    assert handshake.refusal(wrong * 10).endswith("; and 30 more")


def test_parameters_in_one_storage_are_noticed() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(4))
    module.b = torch.nn.Parameter(module.a.data)
    assert Weights(module).described()["b"].shares == "a"


# ---------------------------------------------------------------- plans and words

TWO = (EngineRanks("engine.0", 2, 1, 4), EngineRanks("engine.1", 2, 2, 6))
GRID = MegatronParallel(tp=2, pp=2)
AGREED = terms(TWO, GRID)


def received(agreed: Terms) -> dict[int, int]:
    """Bytes of every engine rank, by its own part of the plan; all parts have one digest."""
    parts = [transfer_plan.route(agreed, rank) for rank in range(agreed.world)]
    assert len({part.digest for part in parts}) == 1
    return {rank: sum(t.nbytes for t in parts[rank].transfers if t.destination == rank) for rank in range(4, 8)}


def test_every_rank_finds_its_part_of_the_same_plan() -> None:
    whole = plan(FAMILY.tensors(HF), Payload(HF).trainer(GRID, "float32"), transfer_plan.engine_layouts(AGREED))
    assert received(AGREED) == {rank: sum(t.nbytes for t in whole.transfers if t.destination == rank) for rank in range(4, 8)}
    assert transfer_plan.route(AGREED, 0).digest == whole.digest
    assert transfer_plan.route(terms(TWO, MegatronParallel(tp=2, dp=2)), 0).digest != whole.digest


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer"])
def test_of_an_adapter_its_own_bytes_travel(experts: Literal["per_expert", "shared_outer"]) -> None:
    """Every engine gets each byte it needs once: what its ranks hold, of which copies are the ranks' own."""
    kind = Kind(("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2, 4.0, experts)
    agreed = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(AGREED, adapter=kind)), type=Terms)
    assert agreed.adapter == kind
    found = received(agreed)
    whole = sum(4 * math.prod(shape) for shape in halves(FAMILY.shape_of(HF), kind).values())
    for engine in (4, 6):
        assert whole <= found[engine] + found[engine + 1] <= 2 * whole
    assert transfer_plan.route(agreed, 0).digest != transfer_plan.route(AGREED, 0).digest


def test_of_failures_the_one_that_others_follow_from_is_told() -> None:
    slow = {"trainer rank 0": "waited 4.0 s for engine.0 rank 0: room", "engine.0 rank 0": "waited 4.1 s for trainer rank 1: its message"}
    assert failing.cause(slow) == slow["engine.0 rank 0"]
    lost = {"trainer rank 0": "from trainer rank 0 to engine.0 rank 0: rank 2 is gone"}
    assert failing.cause(lost) == lost["trainer rank 0"]
    for root in (
        "from trainer rank 1 to engine.0 rank 0: another digest",
        "out of memory: CUDA out of memory (engine.0 rank 1 on b, cuda:1)",
    ):
        assert failing.cause(slow | lost | {"engine.0 rank 1": root}) == root


def test_errors_call_ranks_by_what_they_are() -> None:
    said = "from trainer rank 1 to engine.0 rank 1: engine.0 rank 1 is gone"
    assert failing.in_words(TransferError(1, 5, "rank 5 is gone"), AGREED) == said
    assert failing.in_words(WaitTimeout("rank 7", "its message", 2.0), AGREED) == "waited 2.0 s for engine.1 rank 1: its message"
    assert failing.in_words(WeightSyncError("no room"), AGREED) == "no room"


# ---------------------------------------------------------------- swap


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3, 2))
        self.b = torch.nn.Parameter(torch.zeros(4))
        self.view = self.b.data[1:]
        self.loaded = self.refreshed = 0

    def post_load_weights(self) -> None:
        self.loaded += 1

    def refresh_gemma_weight(self) -> None:
        self.refreshed += 1


def test_storages_are_swapped_but_where_something_views_them() -> None:
    net = Net()
    places = {name: value.data_ptr() for name, value in net.named_parameters()}
    staged = {"a": torch.ones(3, 2), "b": torch.arange(4.0)}
    free = Weights(net).commit(staged)
    assert net.a.data_ptr() == staged["a"].data_ptr()
    assert free["a"].data_ptr() == places["a"]
    assert net.b.data_ptr() == places["b"]
    assert free["b"].data_ptr() == staged["b"].data_ptr()
    assert net.a.equal(torch.ones(3, 2))
    assert net.view.equal(torch.tensor([1.0, 2.0, 3.0]))
    assert (net.loaded, net.refreshed) == (1, 1)


class Adapted(torch.nn.Module):
    """As SGLang's modules with adapters hold their memory: two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a, self.lora_b = torch.zeros(2, 3, 4), torch.zeros(2, 5, 3)
        self.told: list[object] = []

    def on_lora_slots_updated(self, slots: object) -> None:
        self.told.append(slots)


@pytest.mark.parametrize("staging", [True, False])
def test_every_slot_of_adapter_memory_gets_the_new_values(staging: bool) -> None:
    net = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"qkv_proj": Adapted()})])})
    memory = AdapterMemory(net)
    described = memory.described()
    assert {name: one.shape for name, one in described.items()} == {"layers.0.qkv_proj.a": (3, 4), "layers.0.qkv_proj.b": (5, 3)}
    assert described["layers.0.qkv_proj.a"].stride == (4, 1)
    module: Any = net["layers"][0]["qkv_proj"]  # type: ignore[index]
    held, room = module.lora_a, memory.room() if staging else {}
    for update in range(1, 4):
        before = module.lora_a.clone()
        new = {name: torch.rand(one.shape) for name, one in described.items()}
        for name, tensor in (room if staging else memory.tensors()).items():
            tensor.copy_(new[name])
        if staging:
            memory.received(room)
            assert module.lora_a.equal(before)
        room = memory.commit(room if staging else None)
        assert room.keys() == (described.keys() if staging else set())
        for slot in range(2):
            assert module.lora_a[slot].equal(new["layers.0.qkv_proj.a"])
            assert module.lora_b[slot].equal(new["layers.0.qkv_proj.b"])
        assert module.lora_a is held
        assert module.told == [None] * update


# ---------------------------------------------------------------- store and channel

Ranks = Callable[[int], list[Store]]


@pytest.fixture(params=["loopback", "127.0.0.0/8"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Makes stores of several ranks, all in this process: in a file, and at an address."""

    def make(count: int) -> list[Store]:
        hosted = hosting.host(request.param)
        where = hosting.place(hosted)
        return [Store("test", 0, *where, 5.0, hosted), *(Store("test", rank, *where, 5.0) for rank in range(1, count))]

    return make


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that wait for each other; errors are returned."""

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except AsyncmoeError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(attempt, calls))


def test_values_wait_and_time_out_by_name(ranks: Ranks) -> None:
    zero, one = ranks(2)
    with pytest.raises(WaitTimeout, match=r"the trainer's rank 0( at 127\.0\.0\.1:\d+)?: 1.header"):
        one.get(protocol.header(1), 0.2)
    threading.Timer(0.2, lambda: zero.put(protocol.header(1), Header(3, 1))).start()
    assert one.get(protocol.header(1), 5.0) == Header(3, 1)
    a, b, failed = protocol.sent(1, 0), protocol.staged(1, 2), protocol.update_failed(1)
    keys = {a: "trainer rank 0", b: "engine.0 rank 1"}
    one.put(a, Outcome())
    with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for engine\.0 rank 1"):
        zero.get_all(keys, 0.2, failed)
    begin = time.monotonic()
    one.fail(1, a, "broken")
    assert zero.get_all(keys, 5.0, failed) == {a: Outcome("broken")}
    assert time.monotonic() - begin < 2


def test_what_an_update_leaves_is_dropped_but_for_its_header(ranks: Ranks) -> None:
    (zero,) = ranks(1)
    agreed = terms((EngineRanks("engine.0", 2, 1, 1),))
    moved = protocol.moved(4, agreed)
    keys = [protocol.header(4), protocol.end(4), protocol.over(4), *moved]
    assert sorted(key.name for key in moved) == ["4.sent.0", "4.staged.1", "4.staged.2"]
    for key in keys:
        zero.put(key, Outcome())
    zero.forget(4, agreed)
    assert [key.name for key in keys if zero.has(key)] == ["4.header"]


def test_a_group_misses_a_rank_that_does_not_come_or_goes(ranks: Ranks) -> None:
    zero, one = ranks(2)
    with pytest.raises(WaitTimeout, match="the other ranks: to join weight group test"):
        zero.connect(2, 1, 0.5)
    groups = together(lambda: zero.connect(2, 2, 10.0), lambda: one.connect(2, 2, 10.0))
    transport = TorchTransport(groups[0])
    threading.Timer(0.3, lambda: groups.pop()).start()
    with pytest.raises(TransferError, match="from rank 1 to rank 0: rank 1 is gone"):
        transport.exchange([], [(1, transport.empty(4))], 10.0)


def test_a_channel_waits_for_nobody_who_is_gone(ranks: Ranks) -> None:
    zero, one, two = ranks(3)
    agreed = terms((EngineRanks("engine.a", 1, 1, 1), EngineRanks("engine.b", 1, 1, 2)))

    def gone() -> None:
        raise WeightSyncError("engine.b is gone")

    def channels(epoch: int) -> list[str]:
        route_of = [transfer_plan.route(agreed, rank) for rank in (0, 1)]
        ends = together(
            lambda: channel.connect(zero, agreed, route_of[0], epoch, watch=gone),
            lambda: channel.connect(one, agreed, route_of[1], epoch),
        )
        return [str(end) for end in ends]

    begin = time.monotonic()
    assert channels(1) == ["engine.b is gone"] * 2
    two.put(protocol.channel(2, "arrive", 2), Outcome())  # it ends while the others make theirs
    assert channels(2) == ["engine.b is gone"] * 2
    assert time.monotonic() - begin < 10


# ---------------------------------------------------------------- updates: real senders and receivers

Meet = Callable[..., Rig]


@pytest.fixture
def meeting() -> Iterator[Meet]:
    with meetings() as make:
        yield lambda **how: make(delta=False, **how)


def refuse() -> None:
    raise WeightSyncError("checksums differ")


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_what_is_staged_is_committed_once_and_nothing_else_is(meeting: Meet, transport: str) -> None:
    rig = meeting(transport=transport)
    before, rig.before_commit = bits(rig), refuse
    assert {str(one) for one in rig.send(7)} == {"checksums differ"}
    assert bits(rig) == before, "it is staged, and not written"
    with pytest.raises(InvariantBroken, match="cannot commit version 7 of update 2: staged is version 7 of update 1"):
        rig.commit(7, 2)
    with pytest.raises(InvariantBroken, match="staged is nothing"):
        rig.commit(7, 1)
    rig.before_commit = lambda: None
    for version in (8, 9):
        rig.change(0.1, version)
        assert fine(rig.send(version))
        assert rig.wrong == []
    assert {model.refreshed for model in rig.workers.values()} == {2}


def test_without_staging_memory_the_parameters_are_written_where_they_are(meeting: Meet) -> None:
    rig = meeting(in_place=True)
    places = [one.data_ptr() for model in rig.workers.values() for one in model.parameters()]
    seen: list[list[str]] = []
    rig.before_commit = lambda: seen.append(rig.wrong)
    for version in (1, 2):
        rig.change(0.1, version)
        assert fine(rig.send(version))
    assert seen == [[], []], "all is there before the commit"
    assert places == [one.data_ptr() for model in rig.workers.values() for one in model.parameters()]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_failed_update_is_said_on_every_rank_and_the_next_finds_a_new_channel(meeting: Meet, transport: str) -> None:
    rig = meeting(transport=transport)
    assert fine(rig.send(1))
    exchanger = rig.senders[1]._exchanger
    exchanger.close()
    (said,) = {str(one) for one in rig.send(2)}
    assert "an exchanger that is closed was used again" in said
    assert "trainer rank 1" in said
    rig.change(0.1)
    assert fine(rig.send(3))
    assert rig.wrong == []
    assert rig.senders[0]._epoch == 2


def test_whatever_ends_a_receiver_is_reported(meeting: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = meeting()

    def ends(*_: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(rig.receivers[2]._store, "_have", ends)
    (said,) = {str(one) for one in rig.send(1)}
    assert "RuntimeError: SystemExit: 3 (engine.1 rank 0 on " in said
    monkeypatch.undo()
    with pytest.raises(InvariantBroken, match="staged is nothing, because its receiver has ended: RuntimeError: SystemExit: 3"):
        rig.receivers[2].commit(1, 1)


def test_layouts_that_cannot_be_planned_are_reported(meeting: Meet, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    def refuses(*_: Any) -> Any:
        raise LayoutError("embed", got="nothing", expected="a tensor")

    monkeypatch.setattr(transfer_plan, "route", refuses)
    (zero,) = ranks(1)
    zero.put(protocol.TERMS, terms((EngineRanks("engine.0", 1, 1, 1),)))
    join = receiver_command.JoinCommand(*zero._at, "test", 1)
    worker.obey(torch.nn.Linear(2, 2), msgspec.json.encode(join).decode())
    assert zero.get(protocol.ready(1), 10.0).failure == "embed: got nothing, expected a tensor"


def test_a_commit_without_a_sender_is_refused() -> None:
    with pytest.raises(InvariantBroken, match="a worker without a receiver"):
        worker.obey(torch.nn.Linear(2, 2), msgspec.json.encode(receiver_command.CommitCommand(1, 1)).decode())
