"""The rendezvous of the trainer's ranks with the receivers inside the engines, before any weights move."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.config.transports import AUTO, transport_for
from asyncmoe.errors import AsyncmoeError, WeightSyncError
from asyncmoe.models import engine_dtype
from asyncmoe.reshard import Plan
from asyncmoe.rpc import address
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Engines, EnginesAsk, WeightsJoin
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import Card, EngineRanks, MeetingOutcome, Outcome, Ready, Terms
from asyncmoe.weights.receiver import cards, failing, handshake, hosting, transfer_plan
from asyncmoe.weights.receiver.control_store import Store
from asyncmoe.weights.sender.deltas import unsupported
from asyncmoe.weights.sender.trained import TrainedModel

log = logging.getLogger(__name__)
T = TypeVar("T")
_GROUP = "asyncmoe_weights"
_POLL_S = 0.5
GRACE_S = 10.0
"""Ranks wait for rank 0 this many seconds longer than it waits for them, so that all of them receive its reason for a failure."""


@dataclass(frozen=True, eq=False)
class Meeting:
    """A completed rendezvous: the terms all ranks agreed on, and the store they communicate through.

    Attributes:
        roster: number of the engine roster (`asyncmoe.rpc.messages.Engines`); on rank 0 only.
        plan: this rank's part of the plan.
    """

    roster: int
    store: Store
    terms: Terms
    plan: Plan


class NotMet(WeightSyncError):
    """The rendezvous failed.

    Attributes:
        roster: roster number of the expected engines; on rank 0 only.
    """

    def __init__(self, why: str, roster: int) -> None:
        super().__init__(why)
        self.roster = roster


@dataclass(frozen=True, eq=False)
class TrainerRanks:
    """The trainer's ranks in meetings with engines: one object on each rank, with collective calls unless documented otherwise.

    Attributes:
        client: connection to the controller; used on rank 0 only.
        group: CPU process group of all ranks.
    """

    config: Config
    model: TrainedModel
    client: Client
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank."""
        return self.model.mesh.rank

    def meet(self) -> Meeting:
        """Check that all trainer and engine ranks have the same plan, and that the engines' parameters match the layouts.

        Raises:
            NotMet: names each parameter that differs, or the ranks that did not join; the same message on every rank.
        """
        wait_s = self.config.sync.timeout_s
        store, roster = self._open()
        terms = store.get(protocol.TERMS, wait_s)
        try:
            plan = transfer_plan.route(terms, self.rank)
            mine = Ready("", plan.digest, card=cards.card_of(self.model.mesh.device, terms))
        except Exception as error:  # noqa: BLE001  reported to all ranks
            mine = Ready(failing.in_one_line(error, terms))
        if self.rank == 0:
            store.put(protocol.VERDICT, self._judge(store, terms, mine))
        else:
            store.put(protocol.ready(self.rank), mine)
        verdict = store.get(protocol.VERDICT, 2 * wait_s)
        if verdict.failure:
            self.part(store)
            raise NotMet(verdict.failure, roster)
        terms = verdict.settle(terms)
        if self.rank == 0:
            whom, how = ", ".join(engine.name for engine in terms.engines), "deltas where possible" if terms.delta else "in full"
            log.info("weights travel over %s to %s, %s", terms.transport, whom, how)
            if terms.in_place:
                log.warning("engines pause for full updates: a GPU has no room for a second copy of its shard")
        return Meeting(roster, store, terms, plan)

    def part(self, store: Store) -> None:
        """Leave a meeting. Rank 0 hosts the store, so it waits (up to `GRACE_S`) until the other ranks have read all they need and left."""
        try:
            if self.rank == 0:
                store.get_all({protocol.left(rank): f"trainer rank {rank}" for rank in range(1, self.model.mesh.world)}, GRACE_S)
            else:
                store.put(protocol.left(self.rank), Outcome())
        except AsyncmoeError as error:
            log.warning("leaving the weight group: %s", error)

    def in_all(self, here: bool) -> bool:
        """Return whether `here` is true on every rank."""
        found = torch.tensor(int(here), dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MIN, self.group)
        return bool(found)

    def changed(self, roster: int, probe: bool = False) -> bool:
        """Return whether the set of engines differs from `roster`; rank 0 broadcasts the answer.

        Args:
            roster: used on rank 0 only.
            probe: if the set seems the same, wait until each engine has generated or is fenced, because a lost machine is noticed only by
                its missing heartbeats.

        Raises:
            WeightSyncError, WaitTimeout: rank 0 could not ask the controller. The other ranks raise WeightSyncError with the same message.
        """

        def ask() -> bool:
            now, until, asking = self.engines(), time.monotonic() + self.config.cluster.heartbeat_timeout_s + GRACE_S, probe
            while asking and now.roster == roster and time.monotonic() < until:
                now = self.engines(probe=True)
                if asking := now.silent:
                    time.sleep(_POLL_S)
            return now.roster != roster

        return self._of_rank_0(ask)

    # ------------------------------------------------------------ rank 0 only

    def look(self) -> None:
        """Raise WeightSyncError if an engine of the current version, or of the meeting, is gone."""
        if lost := self.engines().lost:
            raise WeightSyncError(f"{', '.join(lost)} is gone")

    def starving(self) -> bool:
        """Return whether there are engines, but all of them wait for a version, so that no engine generates."""
        now = self.engines().engines
        return bool(now) and all(engine.waiting for engine in now)

    def engines(self, probe: bool = False) -> Engines:
        """Ask the controller for the engines."""
        start_s = self.config.engines.start_timeout_s
        engines = self.client.ask(EnginesAsk(start_s, probe), start_s + GRACE_S)[0]
        assert isinstance(engines, Engines)
        return engines

    # ------------------------------------------------------------ internals

    def _open(self) -> tuple[Store, int]:
        """Create the store and start the engines' receivers (rank 0), or connect to the store; return store and roster."""
        store: Store | None = None
        roster = 0

        def keep() -> str:
            nonlocal store, roster
            until = time.monotonic() + self.config.engines.start_timeout_s
            while (engines := self.engines()).awaited and time.monotonic() <= until and not self.config.in_turn:
                time.sleep(_POLL_S)  # there is no engine, but one will come back; in turn, only after the trainer's
            roster = engines.roster
            if not engines.engines:
                raise WeightSyncError("no engine is left")
            store, place = self._keep(engines)
            return place

        try:
            host, _, port = self._of_rank_0(keep).rpartition(":")
        except AsyncmoeError as error:
            raise NotMet(str(error), roster) from error
        return store or Store(_GROUP, self.rank, host, int(port), self.config.sync.timeout_s), roster

    def _judge(self, store: Store, terms: Terms, mine: Ready) -> MeetingOutcome:
        """Return why weights cannot be sent, or whether they will be written in place."""
        everyone = protocol.names(terms)
        names = {rank: whom for rank, whom in everyone.items() if rank != 0}
        try:
            found = store.get_all({protocol.ready(rank): whom for rank, whom in names.items()}, self.config.sync.timeout_s, watch=self.look)
            if resigned := store.resigned():
                return MeetingOutcome(resigned)
        except AsyncmoeError as error:
            return MeetingOutcome(str(error))
        ready = {0: mine} | {rank: found[protocol.ready(rank)] for rank in names}
        failures = [f"{everyone[rank]}: {one.failure}" for rank, one in ready.items() if one.failure]
        in_place = self.config.in_turn or cards.in_place(_cards(ready))
        return MeetingOutcome(handshake.refusal(failures or _differences(terms, ready, names)), in_place)

    def _of_rank_0(self, act: Callable[[], T]) -> T:
        """Return rank 0's result of `act`, which must not be None, on every rank.

        Raises:
            AsyncmoeError: rank 0's own error; on every other rank, a WeightSyncError with the same message.
        """
        told: list[Any] = [None, "rank 0 has failed"]
        try:
            if self.rank == 0:
                told = [act(), ""]
        except AsyncmoeError as error:
            told = [None, str(error)]
            raise
        finally:
            dist.broadcast_object_list(told, src=0, group=self.group)
        if told[0] is None:
            raise WeightSyncError(told[1])
        return cast(T, told[0])

    def _keep(self, engines: Engines) -> tuple[Store, str]:
        """Host the store, publish the terms and start the engines' receivers; return the store and its place, "host:port"."""
        config, model, sync = self.config, self.model, self.config.sync
        world, shared = model.mesh.world, config.in_turn
        # If GPUs cannot read each other's memory, `auto` chooses as it does between machines.
        together = _together(engines) and (shared or sync.transport != AUTO or cards.reach_each_other())
        hosted = hosting.host(config.cluster.network)
        host, port = hosting.place(hosted)
        store = Store(_GROUP, 0, host, port, sync.timeout_s, hosted)
        attn_dp = config.engines.dp_attention
        ranks = tuple(EngineRanks(e.name, e.tp, e.ep, world + e.rank_offset - 1, attn_dp) for e in engines.engines)
        terms = Terms(
            hf=dict(model.hf),
            adapter=model.adapter,
            trainer=model.parallel,
            engines=ranks,
            dtype=str(model.dtype).removeprefix("torch."),
            engine_dtype=engine_dtype(model.hf, config.engines),
            transport=transport_for(sync.transport, model.mesh.backend == "nccl", together, shared),
            session=secrets.token_hex(8),
            bucket_bytes=sync.bucket_bytes,
            timeout_s=sync.timeout_s,
            max_ctas=sync.nccl_max_ctas,
            delta=sync.delta != "off" and not unsupported(config),
        )
        store.put(protocol.TERMS, terms)
        self.client.ask(WeightsJoin(host, port, _GROUP, "gloo", "reshard", world), sync.timeout_s + GRACE_S)
        return store, f"{host}:{port}"


def _together(engines: Engines) -> bool:
    """Return whether all trainer and engine ranks run on this machine; torchrun sets `LOCAL_WORLD_SIZE` to the number of trainer ranks
    here."""
    ours = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    return ours and all(engine.host == address.host_id() for engine in engines.engines)


def _cards(ready: Mapping[int, Ready]) -> dict[int, Card]:
    return {rank: one.card for rank, one in ready.items() if one.card is not None}


def _differences(terms: Terms, ready: Mapping[int, Ready], names: Mapping[int, str]) -> list[str]:
    layouts = {layout.rank: layout for layout in transfer_plan.engine_layouts(terms)}
    wrong = [f"{whom} has a different plan from rank 0" for rank, whom in names.items() if ready[rank].plan != ready[0].plan]
    for engine in terms.engines:
        for tp in range(engine.tp):
            rank = engine.first + tp
            wrong += handshake.differences(ready[rank], engine, tp, layouts[rank])
    return cards.unfit(_cards(ready), terms) + wrong
