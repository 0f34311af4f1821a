"""Publishing a weight version over the `reshard` path: every engine rank gets its own bytes straight from the ranks that have them.

All ranks of the trainer send, to receivers inside the engines (`asyncmoe.receiver`) that stage while the engines generate. Once all
bytes have arrived as they were sent, the controller has every engine stand still and swap (`asyncmoe.rollout.weights`). Until
then no parameter has been written, so whatever fails leaves the engines with the version they serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ConfigError, WeightSyncError
from asyncmoe.receiver import meeting
from asyncmoe.receiver.meeting import Header, Moved, Outcome
from asyncmoe.receiver.transport import GroupTransport
from asyncmoe.receiver.worker import whole_digest
from asyncmoe.reshard import exchange
from asyncmoe.trainer.direct_group import GRACE_S, Meeting, heed, meet
from asyncmoe.trainer.gather import Gatherer, tensors_in
from asyncmoe.trainer.model import Model, parameters
from asyncmoe.trainer.published import Checksums, Published
from asyncmoe.trainer.verify import engine_dtype
from asyncmoe.wire.client import Client
from asyncmoe.wire.messages import Committed, Reply, Request, WeightsAbort, WeightsCommit, WeightsStage


class Direct:
    """The sender of one trainer; a collective over its ranks.

    Args:
        client: connection to the controller; used on rank 0 only.
        checksums: expected engine checksums from the whole Hugging Face checkpoint {name: tensor}; called when a version is to be
            verified.

    Raises:
        ConfigError: what this path cannot do.
    """

    def __init__(self, config: Config, model: Model, client: Client, checksums: Callable[[Mapping[str, torch.Tensor]], Checksums]) -> None:
        self._config, self._sync, self._model, self._client, self._checksums = config, config.sync, model, client, checksums
        self._rank = model.mesh.rank
        _check(config, model)
        self._met: Meeting | None = None
        self._group: dist.ProcessGroup | None = None
        self._updates = self._epoch = 0

    def publish(self, version: int) -> Published:
        """Make `version` what all engines serve. Returns when every engine goes on with it.

        Raises:
            WeightSyncError: with the same words on every rank. Unless an engine failed while it swapped, in which case that one is
                fenced, all serve the version before; the next call may succeed.
        """
        begin = time.perf_counter()
        if self._met is None:
            self._met = meet(self._config, self._model, self._client)
        self._updates += 1
        if self._group is None:
            self._epoch += 1
        try:
            pause_ms = self._lead(self._met, version) if self._rank == 0 else self._follow(self._met)
        except AsyncmoeError as error:
            self._group = None
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(str(error)) from error
        return Published(version, time.perf_counter() - begin, pause_ms)

    def close(self) -> None:
        """Leave the weight group; the engines' receivers end."""
        self._group = self._met = None

    def _lead(self, met: Meeting, version: int) -> float:
        """Rank 0's part; the longest pause in milliseconds."""
        store, number = met.store, self._updates
        if number > 2:
            store.forget(number - 2, met.terms)
        told = "header"
        try:
            self._ask(WeightsStage(version))
            store.put(f"{number}/header", Header(version, self._epoch))
            told = "complete"
            digests = self._send_and_collect(met)
            store.put(f"{number}/complete", Outcome())
            told = "end"
            expected = self._gathered_checksums() if self._verifies else ()
            committed = self._ask(WeightsCommit(version, expected, digests))
        except AsyncmoeError as error:
            failure = str(error)
            store.put(f"{number}/{told}", Header(version, self._epoch, failure) if told == "header" else Outcome(failure))
            if told != "header":
                self._ask(WeightsAbort(version, failure))
            raise
        store.put(f"{number}/end", Outcome())
        assert isinstance(committed, Committed)
        return max(committed.pause_ms)

    def _follow(self, met: Meeting) -> float:
        """The part of every other rank."""
        store, number, wait_s = met.store, self._updates, self._sync.timeout_s + GRACE_S
        header = store.get(f"{number}/header", Header, wait_s)
        heed(Outcome(header.failure))
        self._send(met)
        heed(store.get(f"{number}/complete", Outcome, 2 * wait_s))
        if self._verifies:
            self._gathered_checksums()
        heed(store.get(f"{number}/end", Outcome, 2 * wait_s))
        return 0.0

    def _send(self, met: Meeting) -> None:
        """Send this rank's part, and say what was sent or why not; what fails here is raised when rank 0 has heard of all."""
        key = f"{self._updates}/sent/{self._rank}"
        until = time.monotonic() + met.terms.timeout_s
        try:
            if self._group is None:
                self._group = met.store.connect(met.terms.world, self._epoch, met.terms.timeout_s)
            transport = GroupTransport(self._group, until)
            mine = parameters(self._model)
            for plan in met.plans:
                exchange(plan, transport, mine, timeout_s=met.terms.timeout_s)
        except AsyncmoeError as error:
            self._group = None
            met.store.fail(self._updates, key, Moved(failure=str(error)))
        else:
            met.store.put(key, Moved(digests=transport.digests))

    def _send_and_collect(self, met: Meeting) -> tuple[tuple[str, ...], ...]:
        """Digests of what each rank of each engine has staged.

        Raises:
            WeightSyncError: something did not arrive, or not as it was sent; naming between whom.
            WaitTimeout: naming who was not heard of.
        """
        number, until, engines = self._updates, time.monotonic() + met.terms.timeout_s, meeting.engine_ranks(met.terms)
        self._send(met)
        moved = met.store.get_all(meeting.moved_keys(number, met.terms), Moved, until - time.monotonic(), failed=f"{number}/failed")
        # A rank that waited in vain did so because of one that failed otherwise.
        failures = sorted((one.failure for one in moved.values() if one.failure), key=lambda text: text.startswith("waited"))
        if failures:
            raise WeightSyncError(failures[0])
        sent = [moved[f"{number}/sent/{rank}"].digests for rank in range(self._model.mesh.world)]
        staged = {rank: moved[f"{number}/staged/{rank}"].digests for rank in engines}
        _compare(sent, staged, engines)
        return tuple(tuple(whole_digest(staged[e.first + tp]) for tp in range(e.tp)) for e in met.terms.engines)

    @property
    def _verifies(self) -> bool:
        return self._sync.verify_every > 0 and (self._updates - 1) % self._sync.verify_every == 0

    @cached_property
    def _gatherer(self) -> Gatherer:
        return Gatherer(self._model, self._sync.bucket_bytes, self._sync.timeout_s)

    def _gathered_checksums(self) -> Checksums:
        """Collective over the trainer's ranks: what the engines should report; nothing on ranks other than 0."""
        kept: dict[str, torch.Tensor] = {}
        for bucket, flat in self._gatherer.run():
            if flat is not None:
                kept.update(tensors_in(bucket, flat.cpu()))
        return self._checksums(kept) if self._rank == 0 else ()

    def _ask(self, request: Request) -> Reply:
        return self._client.ask(request, self._sync.timeout_s + GRACE_S)[0]


def _check(config: Config, model: Model) -> None:
    if model.mesh.backend != "gloo":
        raise ConfigError("sync.method", got="reshard on GPUs", expected="broadcast", cure="set sync.method=broadcast")
    ours, theirs = str(model.dtype).removeprefix("torch."), engine_dtype(model.hf, config.engines)
    if theirs != ours:
        cure = f"set engines.dtype={ours} or sync.method=broadcast"
        raise ConfigError("engines.dtype", got=theirs, expected=f"the trainer's {ours}; weights are sent as they are", cure=cure)


def _compare(sent: Sequence[Mapping[int, str]], staged: Mapping[int, Mapping[int, str]], names: Mapping[int, str]) -> None:
    """Refuse bytes that did not arrive as they were sent."""
    wrong = [
        f"{whom} from trainer rank {source}"
        for rank, whom in names.items()
        for source, digests in enumerate(sent)
        if digests.get(rank) != staged[rank].get(source)
    ]
    if wrong:
        raise WeightSyncError(f"digests differ from what was sent: {', '.join(wrong)}")
