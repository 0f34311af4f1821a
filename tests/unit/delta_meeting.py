"""Trainer ranks and engine ranks of a weight meeting, as threads of one process: the real senders and receivers, without SGLang."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from model_cases import MODELS
from reshard_ranks import filled

from asyncmoe.errors import AsyncmoeError
from asyncmoe.models import MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.platform.sglang import receiver_command
from asyncmoe.reshard import RankLayout
from asyncmoe.rpc import messages
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import EngineRanks, MeetingOutcome, Terms
from asyncmoe.weights.receiver import handshake, hosting, transfer_plan, worker
from asyncmoe.weights.receiver.channel import SideStream
from asyncmoe.weights.receiver.control_store import Store
from asyncmoe.weights.receiver.hosting import MeetingFile
from asyncmoe.weights.sender.rendezvous import Meeting, TrainerRanks
from asyncmoe.weights.sender.sender import Sender

HF = MODELS["qwen3_moe"]
ENGINES = (EngineRanks("engine.0", 2, 2, 2), EngineRanks("engine.1", 1, 1, 4))
TRAINER = MegatronParallel(tp=2, etp=2)


class Worker(torch.nn.Module):
    """The parameters of an engine's rank."""

    refreshed = 0

    def post_load_weights(self) -> None:
        self.refreshed += 1


def tensors_of(layout: RankLayout, values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """What the storages of a layout in bfloat16 hold; `values` are bits, int16."""
    return {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in filled(layout, values, np.int16).items()}


@dataclass
class Rig:
    """A meeting, and its requests to the controller.

    Attributes:
        values: bits of the canonical tensors, as the trainer has them.
        asked: requests of rank 0 that the controller gets.
        workers: by rank in the meeting.
        senders: by trainer rank.
    """

    terms: Terms
    values: dict[str, np.ndarray]
    sources: list[dict[str, torch.Tensor]]
    workers: dict[int, Worker]
    hosted: MeetingFile
    receivers: list[worker.Receiver]
    senders: list[Sender] = field(default_factory=list)
    asked: list[messages.Request] = field(default_factory=list)
    before_commit: Callable[[], None] = lambda: None

    def change(self, share: float, seed: int = 0) -> None:
        """Change the bits of a share of the elements, at least one of each tensor, on all trainer ranks."""
        generator = np.random.default_rng(seed)
        for tensor in self.values.values():
            flat = tensor.reshape(-1)
            chosen = generator.choice(flat.size, max(1, round(share * flat.size)), replace=False)
            flat[chosen] ^= generator.integers(1, 1 << 15, len(chosen), np.int16)
        self.refill()

    def refill(self) -> None:
        """Put the values into the sources of all trainer ranks."""
        for rank, sources in enumerate(self.sources):
            for name, tensor in tensors_of(self.layout(rank), self.values).items():
                sources[name].copy_(tensor)

    def layout(self, rank: int) -> RankLayout:
        return Payload(HF).weights_of_trainer(TRAINER, rank, "bfloat16")

    def send(self, version: int) -> list[Any]:
        """All ranks send a version; return each rank's result or error."""

        def part(sender: Sender) -> Any:
            try:
                return sender.send(version, lambda _: ())
            except AsyncmoeError as error:
                sender.leave()
                return error

        with ThreadPoolExecutor(len(self.senders)) as threads:
            return list(threads.map(part, self.senders))

    def ask(self, request: messages.Request, timeout_s: float) -> tuple[messages.Reply, Sequence[bytes]]:
        """The controller's answer to rank 0."""
        if isinstance(request, messages.EnginesAsk):
            return messages.Engines(tuple(messages.EngineInfo(e.name, e.tp, e.ep, 1, 0) for e in self.terms.engines), 1, 1), ()
        self.asked.append(request)
        if not isinstance(request, messages.WeightsCommit):
            return messages.Done(), ()
        self.before_commit()
        self.commit(request.version, request.update)
        return messages.Committed((1.0,) * len(self.terms.engines)), ()

    def commit(self, version: int, update: int) -> None:
        for model in self.workers.values():
            worker.obey(model, msgspec.json.encode(receiver_command.CommitCommand(version, update)).decode())

    @property
    def wrong(self) -> list[str]:
        """Parameters that are not, bit by bit, what the layouts say of the trainer's values."""
        layouts = {layout.rank: layout for layout in transfer_plan.engine_layouts(self.terms)}
        return [
            f"{name} of rank {rank}"
            for rank, model in self.workers.items()
            for name, tensor in tensors_of(layouts[rank], self.values).items()
            if not model.get_parameter(name).view(torch.int16).equal(tensor.view(torch.int16))
        ]

    def kinds(self) -> list[str]:
        """How the updates so far began, in order: full, in place, delta."""
        found = []
        for number in range(1, self.senders[0]._number + 1):
            header = self.senders[0].met.store.get(protocol.header(number), 1.0)
            found.append("failed" if header.failure else "full" if header.base is None else f"delta of {header.base}")
        return found

    def staged_in_place(self) -> list[bool]:
        return [request.in_place for request in self.asked if isinstance(request, messages.WeightsStage)]

    def aborted(self) -> list[str]:
        return [request.why for request in self.asked if isinstance(request, messages.WeightsAbort)]

    def end(self) -> None:
        for sender in self.senders:
            sender.leave()
        for receiver in self.receivers:
            receiver.leave()
        self.hosted._lock.close()  # as when rank 0 has ended; the folder goes with the rig
        for receiver in self.receivers:
            receiver._thread.join(5.0)


@contextmanager
def meetings() -> Iterator[Callable[..., Rig]]:
    """Yield `meet`, and clean up. Ranks are threads here, outside any engine."""
    rigs: list[Rig] = []

    def make(**how: Any) -> Rig:
        rigs.append(meet(**how))
        return rigs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "places", lambda: {"tp_rank": 0, "moe_ep_rank": 0, "attn_dp_rank": 0})
        patch.setattr(handshake, "obstacles", lambda _: [])
        yield make
        for rig in rigs:
            rig.end()


def bits(rig: Rig) -> list[bytes]:
    """Of all parameters of all engine ranks."""
    return [one.view(torch.int16).numpy().tobytes() for model in rig.workers.values() for one in model.parameters()]


def fine(found: list[Any]) -> bool:
    """Whether all ranks sent a version."""
    return all(isinstance(one, float) for one in found)


def meet(
    transport: Literal["shm", "gloo", "ipc"] = "shm",
    in_place: bool = False,
    workers: dict[int, Worker] | None = None,
    delta: bool = True,
    there: type[torch.Tensor] = torch.Tensor,
) -> Rig:
    """A trainer of two tensor-parallel ranks meets an engine of two ranks and one of a single rank; in `meetings`.

    Args:
        workers: of an earlier meeting.
        there: the class of all weights, which says where they are.
    """
    place = torch.zeros(()).as_subclass(there).device
    session = secrets.token_hex(8)
    terms = Terms(HF, None, TRAINER, ENGINES, "bfloat16", "bfloat16", transport, session, 20_000, 20.0, delta=delta)
    hosted = MeetingFile()
    where = hosting.place(hosted)
    stores = [Store("test", 0, *where, 5.0, hosted), Store("test", 1, *where, 5.0)]
    stores[0].put(protocol.TERMS, terms)
    generator = np.random.default_rng(1)
    values = {name: generator.integers(-1 << 15, 1 << 15, shape, np.int16) for name, shape in Payload(HF).tensors().items()}
    workers = dict(workers or {})
    for layout in transfer_plan.engine_layouts(terms):
        workers.setdefault(layout.rank, _worker(layout, there))
        worker.obey(workers[layout.rank], msgspec.json.encode(receiver_command.JoinCommand(*where, "test", layout.rank)).decode())
        assert stores[0].get(protocol.ready(layout.rank), 20.0).failure == ""
    stores[0].put(protocol.VERDICT, MeetingOutcome(in_place=in_place))
    terms = MeetingOutcome(in_place=in_place).settle(terms)
    rig = Rig(terms, values, [], workers, hosted, [worker._receivers[model] for model in workers.values()])
    sync = SimpleNamespace(timeout_s=20.0)
    config: Any = SimpleNamespace(sync=sync, engines=SimpleNamespace(start_timeout_s=5.0), in_turn=False)
    for rank, store in enumerate(stores):
        rig.sources.append({name: one.as_subclass(there) for name, one in tensors_of(rig.layout(rank), values).items()})
        mesh = SimpleNamespace(rank=rank, device=place, world=2)
        side = SideStream(place)
        met = Meeting(1, store, terms, transfer_plan.route(terms, rank))
        event: Any = SimpleNamespace(set=lambda: None)
        ranks: Any = TrainerRanks(config, SimpleNamespace(mesh=mesh), rig, None)  # type: ignore[arg-type]
        rig.senders.append(Sender(ranks, met, rig.sources[rank], side, event))
    return rig


def _worker(layout: RankLayout, there: type[torch.Tensor]) -> Worker:
    model = Worker()
    for name, storage in layout.storages.items():
        *path, last = name.split(".")
        inner: torch.nn.Module = model
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        parameter = torch.nn.Parameter(torch.zeros(storage.shape, dtype=torch.bfloat16).as_subclass(there), requires_grad=False)
        inner.register_parameter(last, parameter)
    return model
