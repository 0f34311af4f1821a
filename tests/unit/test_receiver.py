"""The parts of the weight receiver that need no engine."""

from __future__ import annotations

import base64
import pickle
import pickletools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from asyncmoe.errors import InvariantBroken, LayoutError, ProtocolError, WaitTimeout, WeightSyncError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.receiver import command, handshake, meeting, route, worker
from asyncmoe.receiver.meeting import EngineRanks, Header, Moved, Outcome, Ready, Store, Terms
from asyncmoe.receiver.transport import GroupTransport
from asyncmoe.reshard import LocalTransport, exchange, plan

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


def terms(engines: tuple[EngineRanks, ...], bucket_bytes: int = 1 << 20, **trainer: int) -> Terms:
    return Terms(HF, {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "dp": 1, "te": False} | trainer, engines, "float32", bucket_bytes, 20.0)


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("said", [command.Join("127.0.0.1", 4242, "weights", 3), command.Commit(17, "0123456789abcdef")])
def test_a_command_passes_through_what_sglang_lets_through(said: command.Command) -> None:
    pickled = base64.b64decode(command.payload(said))
    names = [str(value) for _, value, _ in pickletools.genops(pickled) if isinstance(value, str)]
    assert {"types", "SimpleNamespace", "builtins", "str"} <= set(names)
    ((text, tensor),) = pickle.loads(pickled)  # noqa: S301  our own
    tensor.to(0)
    assert command.parse(text) == said


@pytest.mark.parametrize("text", ["", "{}", '{"type":"Leave"}', '{"type":"Commit","version":"x","digest":""}'])
def test_what_is_not_a_command_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="weight command"):
        command.parse(text)


# ---------------------------------------------------------------- handshake


ENGINE = EngineRanks("engine.0", 2, 2, 1)


def fitting() -> Ready:
    layout = family_of(HF).sglang_layout(HF, EngineParallel(2, 2), 1, "float32")
    module = torch.nn.Module()
    for name, storage in layout.storages.items():
        module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.zeros(storage.shape)))
    found = {name.replace("/", "."): value for name, value in handshake.parameters_of(module).items()}
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


def test_parameters_in_one_storage_are_noticed() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(4))
    module.b = torch.nn.Parameter(module.a.data)
    assert handshake.parameters_of(module)["b"].shares == "a"


# ---------------------------------------------------------------- route


ONE = (EngineRanks("engine.0", 1, 1, 4),)
FOUR = tuple(EngineRanks(f"engine.{index}", 1, 1, 1 + index) for index in range(4))
TWO = (EngineRanks("engine.0", 2, 1, 4), EngineRanks("engine.1", 2, 1, 6))


@pytest.mark.parametrize(
    ("engines", "bytes_each", "trainer"), [(ONE, 20_000, {"tp": 2, "dp": 2}), (FOUR, 100_000, {}), (TWO, 20_000, {"tp": 2, "pp": 2})]
)
def test_buckets_are_bounded_and_together_are_the_whole(engines: tuple[EngineRanks, ...], bytes_each: int, trainer: dict[str, int]) -> None:
    agreed = terms(engines, bytes_each, **trainer)
    plans, layouts = route.route(agreed), route.engine_layouts(agreed)
    assert len(plans) > 3
    largest = max(storage.nbytes for layout in layouts for storage in layout.storages.values())
    for one in plans:
        received: dict[int, int] = {}
        for transfer in one.transfers:
            received[transfer.destination] = received.get(transfer.destination, 0) + transfer.nbytes
        assert max(received.values()) <= max(bytes_each, largest)
        together = bytes_each * trainer.get("tp", 1) * trainer.get("dp", 1)
        assert sum(received.values()) <= max(together, len(layouts) * largest)
    for layout in layouts:
        assert [name for one in plans for name in one.destinations[layout.rank]] == list(layout.storages)
    assert agreed.world == layouts[-1].rank + 1
    assert route.digest(plans) != route.digest(plans[::-1])


def test_the_route_ends_where_one_plan_would() -> None:
    agreed = terms((EngineRanks("engine.0", 1, 1, 0),), 10_000)
    family = family_of(HF)
    (layout,) = route.engine_layouts(agreed)
    source = family.megatron_layout(HF, MegatronParallel(), 0, "float32")
    generator = torch.Generator().manual_seed(0)
    held = {name: torch.randn(storage.shape, generator=generator) for name, storage in source.storages.items()}
    blank = [{name: torch.full(storage.shape, torch.nan) for name, storage in layout.storages.items()} for _ in range(2)]
    for one in route.route(agreed):
        exchange(one, LocalTransport(), held, blank[0])
    exchange(plan(family.tensors(HF), [source], [layout]), LocalTransport(), held, blank[1])
    assert all(value.equal(blank[1][name]) for name, value in blank[0].items())


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
    free = worker.replace(net, staged)
    assert net.a.data_ptr() == staged["a"].data_ptr()
    assert free["a"].data_ptr() == places["a"]
    assert net.b.data_ptr() == places["b"]
    assert free["b"].data_ptr() == staged["b"].data_ptr()
    assert net.a.equal(torch.ones(3, 2))
    assert net.view.equal(torch.tensor([1.0, 2.0, 3.0]))
    worker.refresh(net)
    assert (net.loaded, net.refreshed) == (1, 1)


# ---------------------------------------------------------------- store, group, transport


Ranks = Callable[[int], list[Store]]


@pytest.fixture
def ranks() -> Ranks:
    """Makes stores of several ranks, all in this process."""

    def make(count: int) -> list[Store]:
        first, port = keep()
        return [first, *(Store("test", rank, "127.0.0.1", port, 5.0) for rank in range(1, count))]

    return make


def keep() -> tuple[Store, int]:
    """Rank 0's store and its port."""
    listener = meeting.listen("127.0.0.1")
    port = listener.getsockname()[1]
    return Store("test", 0, "127.0.0.1", port, 5.0, listener), port


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that wait for each other; errors are returned."""

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (WaitTimeout, WeightSyncError) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(attempt, calls))


def test_values_wait_and_time_out_by_name(ranks: Ranks) -> None:
    zero, one = ranks(2)
    with pytest.raises(WaitTimeout, match=r"the trainer's rank 0 at 127\.0\.0\.1:\d+: 1/header"):
        one.get("1/header", Header, 0.2)
    threading.Timer(0.2, lambda: zero.put("1/header", Header(3, 1))).start()
    assert one.get("1/header", Header, 5.0) == Header(3, 1)
    keys = {"a": "trainer rank 0", "b": "engine.0 rank 1"}
    one.put("a", Outcome())
    with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for engine\.0 rank 1"):
        zero.get_all(keys, Outcome, 0.2, "1/failed")
    begin = time.monotonic()
    one.fail(1, "a", Outcome("broken"))
    assert zero.get_all(keys, Outcome, 5.0, "1/failed") == {"a": Outcome("broken")}
    assert time.monotonic() - begin < 2


def test_what_an_update_leaves_is_dropped_but_for_its_header(ranks: Ranks) -> None:
    (zero,) = ranks(1)
    agreed = terms((EngineRanks("engine.0", 2, 1, 1),))
    keys = ["4/header", "4/complete", "4/end", *meeting.moved_keys(4, agreed)]
    assert sorted(meeting.moved_keys(4, agreed)) == ["4/sent/0", "4/staged/1", "4/staged/2"]
    for key in keys:
        zero.put(key, Moved())
    zero.forget(4, agreed)
    assert [key for key in keys if zero.has(key)] == ["4/header"]


def test_both_sides_have_the_same_digests_of_what_travelled(ranks: Ranks) -> None:
    stores = ranks(3)
    groups = together(*(lambda store=store: store.connect(3, 1, 10.0) for store in stores))
    transports = [GroupTransport(group, time.monotonic() + 20) for group in groups]
    sent = {1: torch.arange(8, dtype=torch.uint8), 2: torch.full((3,), 7, dtype=torch.uint8)}
    got = {rank: torch.zeros_like(buffer) for rank, buffer in sent.items()}
    for _ in range(2):
        together(
            lambda: transports[0].exchange(list(sent.items()), [], 10.0),
            *(lambda rank=rank: transports[rank].exchange([], [(0, got[rank])], 10.0) for rank in sent),
        )
    assert all(got[rank].equal(buffer) for rank, buffer in sent.items())
    assert transports[0].digests == {1: transports[1].digests[0], 2: transports[2].digests[0]}
    assert len(set(transports[0].digests.values())) == 2
    once = dict(transports[0].digests)
    together(lambda: transports[0].exchange([(1, sent[1])], [], 10.0), lambda: transports[1].exchange([], [(0, got[1])], 10.0))
    assert transports[0].digests != once


def test_a_rank_that_says_nothing_or_goes_is_named(ranks: Ranks) -> None:
    zero, one = ranks(2)
    groups = together(lambda: zero.connect(2, 1, 10.0), lambda: one.connect(2, 1, 10.0))
    transport = GroupTransport(groups[0], time.monotonic() + 0.3)
    begin = time.monotonic()
    with pytest.raises(WaitTimeout, match="rank 1: its message"):
        transport.exchange([], [(1, transport.empty(4))], 10.0)
    assert time.monotonic() - begin < 3
    again = together(lambda: zero.connect(2, 2, 10.0), lambda: one.connect(2, 2, 10.0))
    groups.clear()
    transport = GroupTransport(again[0], time.monotonic() + 10)
    buffer = transport.empty(4)
    threading.Timer(0.3, lambda: again.pop()).start()
    with pytest.raises(WeightSyncError, match="rank 0: rank 1 is gone"):
        transport.exchange([], [(1, buffer)], 10.0)


def test_a_group_that_is_not_complete_is_given_up(ranks: Ranks) -> None:
    (zero,) = ranks(1)
    with pytest.raises(WaitTimeout, match="the other ranks: join weight group test"):
        zero.connect(2, 1, 0.5)


# ---------------------------------------------------------------- the receiver


class Loaded(torch.nn.Module):
    loaded = 0

    def post_load_weights(self) -> None:
        self.loaded += 1


@pytest.fixture
def receiving(monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Terms, torch.nn.Module]:
    """A receiver in this process, without SGLang around it: its store's rank 0, what was agreed, and its model."""
    monkeypatch.setattr(handshake, "places", lambda: {"tp_rank": 0, "moe_ep_rank": 0})
    zero, port = keep()
    agreed = terms((EngineRanks("engine.0", 1, 1, 1),), 20_000)
    zero.put("terms", agreed)
    model = Loaded()
    for name, storage in route.engine_layouts(agreed)[0].storages.items():
        *path, last = name.split(".")
        inner = model
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, torch.nn.Parameter(torch.zeros(storage.shape), requires_grad=False))
    worker.obey(model, msgspec.json.encode(command.Join("127.0.0.1", port, "test", 1)).decode())
    ready = zero.get("ready/1", Ready, 20.0)
    assert ready.plan == route.digest(route.route(agreed))
    assert handshake.differences(ready, agreed.engines[0], 0, route.engine_layouts(agreed)[0]) == []
    zero.put("verdict", Outcome())
    return zero, agreed, model


def send(store: Store, agreed: Terms, number: int, group: Any, weights: dict[str, torch.Tensor]) -> str:
    """Stage version 10 * number; the digest to commit."""
    transport = GroupTransport(group, time.monotonic() + 20)
    for one in route.route(agreed):
        exchange(one, transport, weights)
    staged = store.get(f"{number}/staged/1", Moved, 10.0)
    assert staged.digests == {0: transport.digests[1]}
    return worker.whole_digest(staged.digests)


def commit(model: torch.nn.Module, version: int, digest: str) -> None:
    worker.obey(model, msgspec.json.encode(command.Commit(version, digest)).decode())


def test_what_is_staged_is_committed_once_and_nothing_else_is(receiving: tuple[Store, Terms, torch.nn.Module]) -> None:
    zero, agreed, model = receiving
    source = family_of(HF).megatron_layout(HF, MegatronParallel(), 0, "float32")
    first = {name: torch.full(storage.shape, 1.0) for name, storage in source.storages.items()}
    second = {name: torch.full(storage.shape, 2.0) for name, storage in source.storages.items()}
    zero.put("1/header", Header(10, 1))
    group = zero.connect(2, 1, 10.0)
    digest = send(zero, agreed, 1, group, first)
    assert not model.get_parameter("model.norm.weight").any()
    with pytest.raises(InvariantBroken, match="staged is version 10"):
        commit(model, 10, "0" * 16)
    with pytest.raises(InvariantBroken, match="staged is nothing"):
        commit(model, 10, digest)
    zero.put("2/header", Header(20, 1))
    digest = send(zero, agreed, 2, group, first)
    zero.put("3/header", Header(30, 1))  # the second was given up
    time.sleep(0.3)
    with pytest.raises(InvariantBroken, match="staged is nothing"):
        commit(model, 20, digest)
    send(zero, agreed, 3, group, second)
    with pytest.raises(InvariantBroken, match="staged is version 30"):
        commit(model, 20, digest)
    assert not model.get_parameter("model.norm.weight").any()
    zero.put("4/header", Header(40, 1))
    commit(model, 40, send(zero, agreed, 4, group, second))
    assert model.loaded == 1
    assert all((value == 2).all() for name, value in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    assert (model.get_parameter("lm_head.weight")[:100] == 2).all()
    assert not model.get_parameter("lm_head.weight")[100:].any()


def test_a_failed_update_is_said_and_the_next_finds_a_new_group(receiving: tuple[Store, Terms, torch.nn.Module]) -> None:
    zero, agreed, model = receiving
    source = family_of(HF).megatron_layout(HF, MegatronParallel(), 0, "float32")
    weights = {name: torch.full(storage.shape, 3.0) for name, storage in source.storages.items()}
    zero.put("1/header", Header(10, 1))
    group = zero.connect(2, 1, 10.0)
    group = None
    failed = zero.get("1/staged/1", Moved, 10.0)
    assert "rank 1: " in failed.failure
    assert zero.has("1/failed")
    zero.put("2/header", Header(20, 2, failure="an engine is gone"))
    time.sleep(0.3)
    zero.put("3/header", Header(30, 3))
    group = zero.connect(2, 3, 10.0)
    commit(model, 30, send(zero, agreed, 3, group, weights))
    assert (model.get_parameter("model.norm.weight") == 3).all()
    assert not zero.has("2/staged/1")
    zero.put("4/header", Header(40, 4))  # another rank failed
    group = zero.connect(2, 4, 10.0)
    commit(model, 40, send(zero, agreed, 4, group, weights))


def test_layouts_that_cannot_be_planned_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "places", lambda: {})

    def refuse(_: Terms) -> Any:
        raise LayoutError("embed", got="nothing", expected="a tensor")

    monkeypatch.setattr(route, "route", refuse)
    zero, port = keep()
    zero.put("terms", terms((EngineRanks("engine.0", 1, 1, 1),)))
    model = torch.nn.Linear(2, 2)
    worker.obey(model, msgspec.json.encode(command.Join("127.0.0.1", port, "test", 1)).decode())
    assert zero.get("ready/1", Ready, 10.0).failure == "rank 1: embed: got nothing, expected a tensor"


def test_a_commit_without_a_sender_is_refused() -> None:
    with pytest.raises(InvariantBroken, match="joined no sender"):
        commit(torch.nn.Linear(2, 2), 1, "")
