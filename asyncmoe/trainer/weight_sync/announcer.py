"""Announce versions that lie in a version store to the engines. Only the trainer's rank 0 does this."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, WeightSyncError
from asyncmoe.models import engine_dtype
from asyncmoe.receiver import failing, protocol, transfer_plan
from asyncmoe.receiver.control_store import Store
from asyncmoe.receiver.file_keys import FOLDER, folder_of
from asyncmoe.receiver.protocol import EngineRanks, Header, Ready, StoreTerms, Terms
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Committed, Engines, Reply, Request, WeightsAbort, WeightsCommit, WeightsJoin, WeightsStage
from asyncmoe.trainer.weight_sync import rendezvous
from asyncmoe.trainer.weight_sync.publisher import Expected, device_of
from asyncmoe.version_store import VersionStore

if TYPE_CHECKING:
    from asyncmoe.trainer.model.gpt import Model

log = logging.getLogger(__name__)
_GROUP = "asyncmoe_weights"


@dataclass(frozen=True, eq=False)
class _Met:
    """A meeting with engines. For the attributes see `asyncmoe.trainer.weight_sync.rendezvous.Meeting`."""

    roster: int
    token: str
    store: Store
    terms: Terms
    device: str


class Announcer:
    """Announces versions to whatever engines there are.

    Args:
        client: connection to the controller.
        store: where the versions lie, and where the ranks meet.
    """

    def __init__(self, config: Config, model: Model, client: Client, store: VersionStore) -> None:
        self._config, self._sync, self._model, self._client, self._store = config, config.sync, model, client, store
        self._watch = rendezvous.watch(config, client)
        self._met: _Met | None = None
        self._roster = 0  # of the last attempt
        self._number = 0

    def lineage(self) -> int:
        """Return the lineage of the versions that come next, once engines have started.

        Raises:
            AsyncmoeError: the controller does not answer, or the run is stopped.
        """
        return rendezvous.ask_engines(self._config, self._client).lineage

    def announce(self, version: int, manifest: str, lineage: int, expected: Expected) -> float:
        """Have all engines read a version, and serve it; return their longest pause in milliseconds.

        Args:
            manifest: digest of its manifest.

        Raises:
            WeightSyncError, WaitTimeout: an engine refused, failed or is gone; no engine holds a part of the version, or it is fenced.
        """
        met = self._together(lineage)
        self._number += 1
        number, begun = self._number, False
        if number > 2:
            self._forget(met, number - 2)
        try:
            self._ask(WeightsStage(version))
            begun = True
            met.store.put(protocol.header(number), Header(version, 1, manifest=manifest))
            self._read(met, number)
            committed = self._ask(WeightsCommit(version, expected(met.device), number))
        except Exception as error:
            self._met = None  # a meeting goes on only while all its ranks have staged every version
            if begun:
                self._ask(WeightsAbort(version, failing.in_one_line(error)))
            raise
        assert isinstance(committed, Committed)
        return max(committed.pause_ms)

    def changed(self) -> bool:
        """Return whether the engines are others than in the last attempt, after waiting for the controller to notice a dead one."""
        until = time.monotonic() + rendezvous.noticed_s(self._config)
        while (same := rendezvous.ask_engines(self._config, self._client).roster == self._roster) and time.monotonic() < until:
            time.sleep(0.5)
        return not same

    def part(self) -> None:
        """Leave the meeting and delete its files; receivers see no further version."""
        self._met = None
        self._clean("")

    def _together(self, lineage: int) -> _Met:
        """Return a meeting with the current engines."""
        engines = rendezvous.some_engines(self._config, self._client)
        self._roster = engines.roster
        if self._met is not None and self._met.roster == engines.roster:
            return self._met
        self._met, self._number = None, 0
        if not engines.engines:
            raise WeightSyncError("no engine is left")
        self._met = self._meet(engines, lineage)
        return self._met

    def _meet(self, engines: Engines, lineage: int) -> _Met:
        """Start receivers in the engines, and check that they hold what the layouts say.

        Raises:
            WeightSyncError: names each parameter that differs, or the ranks that did not come.
        """
        token = secrets.token_hex(8)
        self._clean(token)
        url = self._sync.store.url
        assert url is not None
        place = folder_of(url, token)
        store = Store(_GROUP, 0, place, 0, self._sync.timeout_s)
        ranks = tuple(EngineRanks(one.name, one.tp, one.ep, one.rank_offset) for one in engines.engines)
        terms = Terms(
            hf=dict(self._model.hf),
            adapter=None,
            trainer=asdict(self._model.parallel),
            engines=ranks,
            dtype=str(self._model.dtype).removeprefix("torch."),
            engine_dtype=engine_dtype(self._model.hf, self._config.engines),
            transport="gloo",
            session=token,
            staging="full",
            bucket_bytes=self._sync.bucket_bytes,
            timeout_s=self._sync.timeout_s,
            store=StoreTerms(url, self._store.run, lineage),
        )
        store.put(protocol.TERMS, terms)
        self._ask(WeightsJoin(place, 0, _GROUP, "gloo", "reshard", 1))
        mine = Ready("", transfer_plan.route(terms, 0).digest)
        verdict = rendezvous.judge(store, terms, mine, self._sync.timeout_s, self._watch)
        store.put(protocol.VERDICT, verdict)
        if verdict.failure:
            raise WeightSyncError(verdict.failure)
        log.info("weights travel through %s to %s", self._store.files.shown, ", ".join(one.name for one in ranks))
        return _Met(engines.roster, token, store, terms, device_of(engines))

    def _read(self, met: _Met, number: int) -> None:
        """Wait until every engine rank has read its shard.

        Raises:
            WeightSyncError: one could not.
            WaitTimeout: names the ranks that did not report.
        """
        keys = {protocol.staged(number, rank): name for rank, name in protocol.engine_ranks(met.terms).items()}
        wait_s = self._sync.timeout_s + rendezvous.GRACE_S
        found = met.store.get_all(keys, wait_s, protocol.update_failed(number), self._watch)
        failures = {keys[key]: outcome.failure for key, outcome in found.items() if outcome.failure}
        if resigned := met.store.resigned():
            failures[""] = resigned
        if failures:
            raise WeightSyncError(failing.cause(failures))

    def _forget(self, met: _Met, number: int) -> None:
        """Delete the keys of a version."""
        try:
            met.store.forget(number, met.terms)
        except AsyncmoeError as error:
            log.warning("files of an announced version stay in %s until the next meeting: %s", self._store.files.shown, error)

    def _clean(self, token: str) -> None:
        """Delete the files of all meetings but one."""
        try:
            for name in self._store.files.names(FOLDER):
                if not token or not name.startswith(f"{FOLDER}/{token}/"):
                    self._store.files.delete(name)
        except AsyncmoeError as error:
            log.warning("files of former meetings stay in %s: %s", self._store.files.shown, error)

    def _ask(self, request: Request) -> Reply:
        return self._client.ask(request, self._sync.timeout_s + rendezvous.GRACE_S)[0]
