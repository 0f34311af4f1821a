"""The parts of the weight receiver that need no engine."""

from __future__ import annotations

import base64
import math
import pickle
import pickletools
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch

from asyncmoe.config.transports import transport_for
from asyncmoe.errors import (
    AsyncmoeError,
    ConfigError,
    InvariantBroken,
    LayoutError,
    ProtocolError,
    ReportedFailure,
    TransferError,
    WaitTimeout,
    WeightSyncError,
)
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.lora.adapter import Kind, halves
from asyncmoe.platform.sglang import receiver_command
from asyncmoe.reshard import Exchanger, plan
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import AdapterTerms, EngineRanks, Header, MeetingOutcome, Outcome, Ready, Terms
from asyncmoe.weights.receiver import channel, failing, handshake, hosting, transfer_plan, worker
from asyncmoe.weights.receiver.control_store import Store
from asyncmoe.weights.receiver.weight_buffers import AdapterMemory, Weights

HF = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def terms(engines: tuple[EngineRanks, ...], transport: Literal["shm", "gloo"] = "shm", **trainer: int) -> Terms:
    sizes = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "dp": 1, "te": False} | trainer
    return Terms(HF, None, sizes, engines, "float32", "float32", transport, secrets.token_hex(8), 20_000, 20.0)


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


def fitting() -> Ready:
    layout = family_of(HF).sglang_layout(HF, EngineParallel(2, 2), 1, "float32")
    module = torch.nn.Module()
    for name, storage in layout.storages.items():
        module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.zeros(storage.shape)))
    found = {name.replace("/", "."): value for name, value in Weights(module).described().items()}
    return Ready(parameters=found, places={"tp_rank": 1, "moe_ep_rank": 1})


def differences(ready: Ready) -> list[str]:
    return handshake.differences(ready, ENGINE, 1, family_of(HF).sglang_layout(HF, EngineParallel(2, 2), 1, "float32"))


def test_a_worker_as_the_layout_says_is_taken() -> None:
    assert differences(fitting()) == []


W2 = "model.layers.1.mlp.experts.w2_weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": (2, 16, 32)}, "got float32[2, 16, 32] with strides [512, 16, 1], expected float32[2, 32, 16]"),
        ({"dtype": "bfloat16"}, "got bfloat16[2, 32, 16], expected float32[2, 32, 16]"),
        ({"stride": (512, 1, 32)}, "got float32[2, 32, 16] with strides [512, 1, 32], expected"),
        ({"shares": "lm_head.weight"}, "got float32[2, 32, 16] in the storage of lm_head.weight, expected"),
    ],
)
def test_a_parameter_that_differs_is_named(change: dict[str, Any], said: str) -> None:
    ready = fitting()
    parameters = ready.parameters | {W2: msgspec.structs.replace(ready.parameters[W2], **change)}
    (line,) = differences(msgspec.structs.replace(ready, parameters=parameters))
    assert line.startswith(f"engine.0 rank 1: {W2}: {said}")


def test_parameters_that_are_missing_or_unknown_and_ranks_are_named() -> None:
    ready = fitting()
    parameters = {name: p for name, p in ready.parameters.items() if name != W2} | {"extra": ready.parameters[W2]}
    wrong = differences(msgspec.structs.replace(ready, parameters=parameters, places={"tp_rank": 1, "moe_ep_rank": 0}))
    assert wrong == [
        "engine.0 rank 1 is moe_ep_rank 0, expected 1",
        "engine.0 rank 1: extra: got float32[2, 32, 16], expected no such parameter",
        f"engine.0 rank 1: {W2}: got no such parameter, expected float32[2, 32, 16]",
    ]
    assert handshake.refusal(wrong * 10).endswith("; and 10 more")


def test_a_worker_that_rearranges_its_weights_is_refused() -> None:
    ready = msgspec.structs.replace(fitting(), obstacles=("its MoE runner flashinfer_cutlass rearranges expert weights",))
    assert differences(ready) == [
        "engine.0 rank 1: its MoE runner flashinfer_cutlass rearranges expert weights; or set sync.method=broadcast"
    ]


def test_parameters_in_one_storage_are_noticed() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(4))
    module.b = torch.nn.Parameter(module.a.data)
    assert Weights(module).described()["b"].shares == "a"


# ---------------------------------------------------------------- route


TWO = (EngineRanks("engine.0", 2, 1, 4), EngineRanks("engine.1", 2, 2, 6))


def test_every_rank_finds_its_part_of_the_same_plan() -> None:
    agreed = terms(TWO, tp=2, pp=2)
    family = family_of(HF)
    source = family.megatron_layouts(HF, MegatronParallel(tp=2, pp=2), "float32")
    whole = plan(family.tensors(HF), source, transfer_plan.engine_layouts(agreed))
    parts = [transfer_plan.route(agreed, rank) for rank in range(agreed.world)]
    assert {part.digest for part in parts} == {whole.digest}
    received = {rank: sum(t.nbytes for t in parts[rank].transfers if t.destination == rank) for rank in range(4, 8)}
    assert received == {rank: sum(t.nbytes for t in whole.transfers if t.destination == rank) for rank in range(4, 8)}
    assert all(received.values())
    assert transfer_plan.route(terms(TWO, tp=2, pp=1, dp=2), 0).digest != whole.digest


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer"])
def test_of_an_adapter_its_own_bytes_travel(experts: Literal["per_expert", "shared_outer"]) -> None:
    """Every engine gets each byte it needs once: what its ranks hold, of which copies are the ranks' own."""
    adapter = AdapterTerms(("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2, 4.0, experts)
    agreed = msgspec.structs.replace(terms(TWO, tp=2, pp=2), adapter=adapter)
    parts = [transfer_plan.route(agreed, rank) for rank in range(agreed.world)]
    assert len({part.digest for part in parts}) == 1
    assert parts[0].digest != transfer_plan.route(terms(TWO, tp=2, pp=2), 0).digest
    kind = Kind(adapter.targets, adapter.rank, adapter.alpha, adapter.experts)
    shapes = halves(family_of(HF).shape_of(HF), kind)
    # Both tensor-parallel ranks of engine.0 hold A of q, gate and up, and B of o and down; engine.1's ranks have experts of their own.
    whole = sum(4 * math.prod(shape) for shape in shapes.values())
    received = {rank: sum(t.nbytes for t in parts[rank].transfers if t.destination == rank) for rank in range(4, 8)}
    for engine in (4, 6):
        assert whole <= received[engine] + received[engine + 1] <= 2 * whole
    layouts = {layout.rank: layout for layout in transfer_plan.engine_layouts(agreed)}
    assert {name.split(".", 2)[2] for name in layouts[4].storages} == {
        f"{module}.{half}" for module in ("qkv_proj", "o_proj", "gate_up_proj_moe", "down_proj_moe") for half in "ab"
    }


def test_of_failures_the_one_that_others_follow_from_is_told() -> None:
    slow = {"trainer rank 0": "waited 4.0 s for engine.0 rank 0: room", "engine.0 rank 0": "waited 4.1 s for trainer rank 1: its message"}
    assert failing.cause(slow) == slow["engine.0 rank 0"]
    lost = {"trainer rank 0": "from trainer rank 0 to engine.0 rank 0: rank 2 is gone"}
    assert failing.cause(lost) == lost["trainer rank 0"]
    damaged = {"engine.0 rank 0": "from trainer rank 1 to engine.0 rank 0: another digest"}
    assert failing.cause(slow | lost | damaged) == damaged["engine.0 rank 0"]


def test_errors_call_ranks_by_what_they_are() -> None:
    agreed = terms(TWO, tp=2, pp=2)
    assert (
        failing.in_words(TransferError(1, 5, "rank 5 is gone"), agreed) == "from trainer rank 1 to engine.0 rank 1: engine.0 rank 1 is gone"
    )
    late = failing.in_words(WaitTimeout("rank 7", "its message", 2.0), agreed)
    assert late == "waited 2.0 s for engine.1 rank 1: its message"
    assert failing.in_words(WeightSyncError("no room"), agreed) == "no room"


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
    held, room = module.lora_a, memory.room(torch.float32) if staging else {}
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


# ---------------------------------------------------------------- store, group, transport


Ranks = Callable[[int], list[Store]]


@pytest.fixture(params=["loopback", "127.0.0.0/8"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Makes stores of several ranks, all in this process: in a file, and at an address."""

    def make(count: int) -> list[Store]:
        first, where = keep(request.param)
        return [first, *(Store("test", rank, *where, 5.0) for rank in range(1, count))]

    return make


def keep(network: str = "loopback") -> tuple[Store, tuple[str, int]]:
    """Rank 0's store and its place."""
    hosted = hosting.host(network)
    where = hosting.place(hosted)
    return Store("test", 0, *where, 5.0, hosted), where


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


def test_others_are_waited_for_with_one_question_a_look(ranks: Ranks) -> None:
    """Rank 0 waits beside its step: 383 ranks that are late are not asked for one by one, again and again."""
    zero, one = ranks(2)
    keys = {protocol.staged(1, rank): f"rank {rank}" for rank in range(383)}
    asked = []
    store = zero._store
    zero._store = SimpleNamespace(check=lambda names: asked.append(len(names)) or store.check(names), multi_get=store.multi_get)
    threading.Timer(0.5, lambda: [one.put(key, Outcome(whom)) for key, whom in keys.items()]).start()
    found = zero.get_all(keys, 5.0)
    assert found == {key: Outcome(whom) for key, whom in keys.items()}
    assert len(asked) < 600
    assert set(asked) == {1, 383}


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


def test_a_rank_that_says_nothing_or_goes_is_named(ranks: Ranks) -> None:
    zero, one = ranks(2)
    groups = together(lambda: zero.connect(2, 1, 10.0), lambda: one.connect(2, 1, 10.0))
    transport = TorchTransport(groups[0])
    begin = time.monotonic()
    with pytest.raises(WaitTimeout, match="rank 1: its message"):
        transport.exchange([], [(1, transport.empty(4))], 0.3)
    assert time.monotonic() - begin < 3
    again = together(lambda: zero.connect(2, 2, 10.0), lambda: one.connect(2, 2, 10.0))
    groups.clear()
    transport = TorchTransport(again[0])
    buffer = transport.empty(4)
    threading.Timer(0.3, lambda: again.pop()).start()
    with pytest.raises(TransferError, match="from rank 1 to rank 0: rank 1 is gone"):
        transport.exchange([], [(1, buffer)], 10.0)


def test_a_group_that_is_not_complete_is_given_up(ranks: Ranks) -> None:
    (zero,) = ranks(1)
    with pytest.raises(WaitTimeout, match="the other ranks: join weight group test"):
        zero.connect(2, 1, 0.5)


def test_a_channel_waits_for_nobody_who_is_gone(ranks: Ranks) -> None:
    zero, one, two = ranks(3)
    agreed = terms((EngineRanks("engine.a", 1, 1, 1), EngineRanks("engine.b", 1, 1, 2)))

    def gone() -> None:
        raise WeightSyncError("engine.b is gone")

    def channels(epoch: int) -> list[Any]:
        route_of = [transfer_plan.route(agreed, rank) for rank in (0, 1)]
        return together(
            lambda: channel.connect(zero, agreed, route_of[0], epoch, watch=gone),
            lambda: channel.connect(one, agreed, route_of[1], epoch),
        )

    begin = time.monotonic()
    assert [str(end) for end in channels(1)] == ["engine.b is gone"] * 2
    two.put(protocol.channel(2, "arrive", 2), protocol.Arrived())  # it ends while the others make theirs
    assert [str(end) for end in channels(2)] == ["engine.b is gone"] * 2
    assert time.monotonic() - begin < 10


def test_an_end_of_a_channel_that_cannot_be_made_ends_the_others(ranks: Ranks) -> None:
    zero, one = ranks(2)
    agreed = terms((EngineRanks("engine.a", 1, 1, 1),))
    wrong = msgspec.structs.replace(agreed, session="no/name")
    ends = together(
        lambda: channel.connect(zero, agreed, transfer_plan.route(agreed, 0), 1),
        lambda: channel.connect(one, wrong, transfer_plan.route(wrong, 1), 1),
    )
    assert [type(end) for end in ends] == [ReportedFailure] * 2
    assert str(ends[0]) == str(ends[1])
    assert "session of shared memory: got 'no/name-1'" in str(ends[0])


# ---------------------------------------------------------------- the receiver


class Loaded(torch.nn.Module):
    loaded = 0

    def post_load_weights(self) -> None:
        self.loaded += 1


@dataclass
class Sending:
    """The sender of a receiver in this process, without SGLang around it."""

    store: Store
    terms: Terms
    model: Loaded
    exchanger: Exchanger | None = None

    def header(self, number: int, epoch: int = 1, failure: str = "") -> None:
        """Update `number` begins; its version is ten times that."""
        self.store.put(protocol.header(number), Header(10 * number, epoch, failure))

    def send(self, number: int, value: float, epoch: int = 1) -> None:
        """Weights of which all elements are `value`; returns when they are received."""
        self.header(number, epoch)
        if self.exchanger is None:
            self.exchanger = channel.connect(self.store, self.terms, transfer_plan.route(self.terms, 0), epoch)
        storages = family_of(HF).megatron_layout(HF, MegatronParallel(), 0, "float32").storages
        self.exchanger.bind({name: torch.full(storage.shape, value) for name, storage in storages.items()})
        self.exchanger.run(10.0)
        assert self.store.get(protocol.staged(number, 1), 10.0) == Outcome()

    def leave(self) -> None:
        if self.exchanger is not None:
            self.exchanger.close()
        self.exchanger = None

    def end(self) -> None:
        """Leave, and wait for the receiver's thread: at the interpreter's exit, one in torch's code would abort the process."""
        self.leave()
        receiver = worker._receivers[self.model]
        receiver.leave()
        del self.store
        receiver.join(5.0)

    def commit(self, version: int, update: int) -> None:
        worker.obey(self.model, msgspec.json.encode(receiver_command.CommitCommand(version, update)).decode())

    @property
    def norm(self) -> float:
        return float(self.model.get_parameter("model.norm.weight").mean())


@pytest.fixture
def receiving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sending]:
    transport, in_place = getattr(request, "param", ("shm", False))
    monkeypatch.setattr(handshake, "places", lambda: {"tp_rank": 0, "moe_ep_rank": 0})
    monkeypatch.setattr(handshake, "obstacles", lambda _: [])
    zero, where = keep()
    agreed = terms((EngineRanks("engine.0", 1, 1, 1),), transport)
    zero.put(protocol.TERMS, agreed)
    model = Loaded()
    for name, storage in transfer_plan.engine_layouts(agreed)[0].storages.items():
        *path, last = name.split(".")
        inner: torch.nn.Module = model
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, torch.nn.Parameter(torch.zeros(storage.shape), requires_grad=False))
    worker.obey(model, msgspec.json.encode(receiver_command.JoinCommand(*where, "test", 1)).decode())
    ready = zero.get(protocol.ready(1), 20.0)
    assert ready.plan == transfer_plan.route(agreed, 0).digest
    assert handshake.differences(ready, agreed.engines[0], 0, transfer_plan.engine_layouts(agreed)[0]) == []
    zero.put(protocol.VERDICT, MeetingOutcome(in_place=in_place))
    sending = Sending(zero, agreed, model)
    del zero
    yield sending
    sending.end()


BOTH_TRANSPORTS = pytest.mark.parametrize("receiving", [("shm", False), ("gloo", False)], indirect=True, ids=["shm", "gloo"])


@BOTH_TRANSPORTS
def test_what_is_staged_is_committed_once_and_nothing_else_is(receiving: Sending) -> None:
    model = receiving.model
    receiving.send(1, 1.0)
    assert receiving.norm == 0
    with pytest.raises(InvariantBroken, match="staged is version 10 of update 1"):
        receiving.commit(10, 2)
    with pytest.raises(InvariantBroken, match="staged is nothing"):
        receiving.commit(10, 1)
    receiving.send(2, 1.0)
    receiving.header(3)  # the second was given up
    time.sleep(0.3)
    with pytest.raises(InvariantBroken, match="staged is nothing"):
        receiving.commit(20, 2)
    receiving.send(3, 2.0)
    with pytest.raises(InvariantBroken, match="staged is version 30 of update 3"):
        receiving.commit(20, 3)
    assert receiving.norm == 0
    receiving.send(4, 2.0)
    receiving.commit(40, 4)
    assert model.loaded == 1
    assert all((value == 2).all() for name, value in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    assert (model.get_parameter("lm_head.weight")[:100] == 2).all()
    assert not model.get_parameter("lm_head.weight")[100:].any()
    receiving.send(5, 3.0)
    assert receiving.norm == 2
    receiving.commit(50, 5)
    assert receiving.norm == 3


@pytest.mark.parametrize("receiving", [("shm", True), ("gloo", True)], indirect=True, ids=["shm", "gloo"])
def test_without_staging_memory_the_parameters_are_written_where_they_are(receiving: Sending) -> None:
    places = {name: value.data_ptr() for name, value in receiving.model.named_parameters()}
    for number in (1, 2):
        receiving.send(number, float(number))
        assert receiving.norm == number
        assert receiving.model.loaded == number - 1
        receiving.commit(10 * number, number)
        assert receiving.model.loaded == number
    assert places == {name: value.data_ptr() for name, value in receiving.model.named_parameters()}


@BOTH_TRANSPORTS
def test_a_failed_update_is_said_and_the_next_finds_a_new_channel(receiving: Sending) -> None:
    zero = receiving.store
    receiving.send(1, 1.0)
    receiving.header(2)
    receiving.leave()
    assert "trainer rank 0" in zero.get(protocol.staged(2, 1), 10.0).failure
    assert zero.get(protocol.update_failed(2), 5.0) == Outcome()
    receiving.header(3, 2, failure="an engine is gone")
    time.sleep(0.3)
    receiving.send(4, 3.0, epoch=3)
    receiving.commit(40, 4)
    assert receiving.norm == 3
    assert not zero.has(protocol.staged(3, 1))
    receiving.leave()
    receiving.send(5, 4.0, epoch=4)  # another rank failed
    receiving.commit(50, 5)
    assert receiving.norm == 4


def test_whatever_ends_a_receiver_is_reported(receiving: Sending, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = worker._receivers[receiving.model]

    def ends(*_: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(receiver._store, "_have", ends)
    receiving.header(1)
    receiver.join(10.0)
    assert "RuntimeError: SystemExit: 3 (engine.0 rank 0 on " in receiving.store.resigned()
    with pytest.raises(InvariantBroken, match="staged is nothing, because its receiver has ended: RuntimeError: SystemExit: 3"):
        receiving.commit(10, 1)


def test_layouts_that_cannot_be_planned_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "places", lambda: {})
    monkeypatch.setattr(handshake, "obstacles", lambda _: [])

    def refuse(*_: Any) -> Any:
        raise LayoutError("embed", got="nothing", expected="a tensor")

    monkeypatch.setattr(transfer_plan, "route", refuse)
    zero, where = keep()
    zero.put(protocol.TERMS, terms((EngineRanks("engine.0", 1, 1, 1),)))
    model = torch.nn.Linear(2, 2)
    worker.obey(model, msgspec.json.encode(receiver_command.JoinCommand(*where, "test", 1)).decode())
    assert zero.get(protocol.ready(1), 10.0).failure == "embed: got nothing, expected a tensor"


def test_a_commit_without_a_sender_is_refused() -> None:
    with pytest.raises(InvariantBroken, match="a worker without a receiver"):
        worker.obey(torch.nn.Linear(2, 2), msgspec.json.encode(receiver_command.CommitCommand(1, 1)).decode())


# ---------------------------------------------------------------- transports


def test_messages_travel_where_the_weights_are() -> None:
    assert [transport_for("auto", gpu) for gpu in (False, True)] == ["shm", "ipc"]
    assert [transport_for(way, True) for way in ("nccl", "ipc")] == ["nccl", "ipc"]
    for wanted, gpu, where, able, unable in (
        ("shm", True, "GPUs", {"nccl", "ipc"}, "gloo"),
        ("nccl", False, "CPUs", {"shm", "gloo"}, "ipc"),
    ):
        with pytest.raises(ConfigError, match=rf"sync.transport: got {wanted}, expected auto, .* between {where}") as caught:
            transport_for(wanted, gpu)
        words = set(re.findall(r"\w+", str(caught.value)))
        assert able <= words
        assert unable not in words
