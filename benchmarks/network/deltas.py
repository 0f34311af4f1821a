"""A rank's part of updates that are deltas, and of full ones next to them, by the calls that a run's trainer and engines make."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.errors import InvariantBroken
from asyncmoe.models import family_of
from asyncmoe.reshard import DeltaDecoder, DeltaEncoder, Exchanger, Moved, Plan, RankLayout
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import Coming, EngineRanks, Header, Offer, Terms
from asyncmoe.weights.receiver.control_store import Store
from asyncmoe.weights.receiver.deltas import receive
from asyncmoe.weights.receiver.weight_buffers import Tensors, Weights
from asyncmoe.weights.sender.deltas import comings, common_base, offer
from benchmarks.memory import Growth, give_back
from benchmarks.network.cases import DTYPE, Case
from benchmarks.network.changes import change
from benchmarks.network.counters import Clock, timed
from benchmarks.reshard import numbered

_UNWRITTEN = -1
_CHANNEL = 1

Arrays = dict[str, np.ndarray]
Turn = dict[str, Any]


class ClockedExchanger(Exchanger):
    """Knows how long it ran.

    Attributes:
        carried_s: seconds of the latest run.
    """

    carried_s = 0.0

    def run(self, *arguments: Any, **named: Any) -> Moved:
        started = time.perf_counter()
        moved = super().run(*arguments, **named)
        self.carried_s = time.perf_counter() - started
        return moved


class DeltaRank:
    """What a rank does for deltas, once its full updates are measured: a full update, from which deltas start, then pairs of a full update
    and a delta of the same version.

    An engine host holds its weights and memory for a second copy. A full update goes there, the delta of the
    same version into the weights; then both are compared. So there are never more copies of a shard than these two on an engine host, and
    two on a trainer host: its weights, and what it published last.

    Args:
        exchanger: made for `plan`, with `delta`.
        held: on a trainer host, its weights.
        weights: on an engine host, its weights.
    """

    def __init__(
        self,
        case: Case,
        plan: Plan,
        exchanger: ClockedExchanger,
        store: Store,
        layout: RankLayout,
        held: Arrays,
        weights: Arrays,
        timeout_s: float,
        bucket_bytes: int,
    ) -> None:
        self._case, self._plan, self._exchanger, self._store, self._layout, self._limit = case, plan, exchanger, store, layout, timeout_s
        self._shapes, self._rank, self._terms = family_of(case.hf).tensors(case.hf), layout.rank, _terms(case, timeout_s, bucket_bytes)
        self._held, self._target = held, Weights(_model(_tensors(weights)))
        self._spare: Tensors = {}
        self._number = self._version = 0  # of the update, as in `asyncmoe.weights.protocol`, and of the weights
        self._drawn: list[tuple[int, float]] = []
        growth = Growth()
        self._source: DeltaEncoder | None = None
        self._staging: DeltaDecoder | None = None
        if layout.rank < case.trainers:
            self._source = DeltaEncoder(plan, self._rank, bucket_bytes=bucket_bytes, threads=1)
            self._source.bind(_tensors(held))
        else:
            self._staging = DeltaDecoder(plan, self._rank, bucket_bytes=bucket_bytes, threads=1)
        self._tables_bytes = growth.now_bytes()
        give_back()
        self._growth = Growth()

    def run(self, percents: Sequence[float], rounds: int) -> dict[str, Any]:
        """Every percent in turn, round after round; in every second pair the delta comes first.

        Returns:
            "full", the turn of the full update from which deltas start; "pairs", by percent a list of {"dense", "delta"}, turns with their
            commits; "right", whether this rank's weights are in the end what they should be.
        """
        full = self._start()
        found: dict[str, list[dict[str, Turn]]] = {f"{percent:g}": [] for percent in percents}
        for number in range(rounds):
            for place, percent in enumerate(percents):
                found[f"{percent:g}"].append(self._pair(percent, dense_first=(number + place) % 2 == 0))
        return {"full": full, "pairs": found, "right": self._proven()}

    def _start(self) -> Turn:
        """Bring everything, as a run's first update does, into staging memory that an engine takes for it."""
        phases, spent = timed(self._update)
        if self._staging is not None:
            self._spare = self._target.commit(self._spare)
            self._staging.bind(self._target.tensors())
        peak = self._growth.peak_bytes()
        give_back()
        self._growth = Growth()
        return {**spent, "phases": phases, "peak_extra_bytes": peak}

    def _pair(self, percent: float, *, dense_first: bool) -> dict[str, Turn]:
        self._version += 1
        self._drawn.append((self._version, percent))
        if self._source is not None:
            change(self._layout, self._shapes, self._held, self._version, percent)
        for tensor in self._spare.values():
            _bits(tensor).fill_(_UNWRITTEN)
        turns: list[tuple[str, Callable[[], Turn]]] = [("dense", self._dense), ("delta", self._delta)]
        found = {name: turn() for name, turn in (turns if dense_first else reversed(turns))}
        right = self._committed(found["dense"], found["delta"])
        return {name: {**turn, "right": right} for name, turn in found.items()}

    def _dense(self) -> Turn:
        """A full update as of a run without deltas."""

        def turn() -> dict[str, float]:
            self._exchanger.bind(self._held, self._spare)
            return self._exchanger.run(self._limit).seconds

        phases, spent = timed(turn)
        return {**spent, "phases": phases}

    def _delta(self) -> Turn:
        give_back()  # of earlier deltas, which may have been larger
        self._growth.again()
        phases, spent = timed(self._update)
        return {**spent, "phases": phases, "peak_extra_bytes": self._tables_bytes + self._growth.peak_bytes()}

    def _committed(self, dense: Turn, delta: Turn) -> bool:
        """Commit what came in both ways; return whether it is the same. Adds "commit_s" to both turns: of a delta, of writing it into the
        weights; of a full update, of a swap; and "copy_s", of a copy, where a tensor must keep its place (`Weights`)."""
        dist.barrier()
        clock, same = Clock(), True
        if self._staging is not None:
            self._staging.commit(self._version)
            self._target.commit(None)
            delta["commit_s"] = clock.lap()
            live = self._target.tensors()
            same = all(torch.equal(_bits(live[name]), _bits(new)) for name, new in self._spare.items())
            clock.lap()
            for name, new in self._spare.items():
                live[name].copy_(new)
            dense["copy_s"] = clock.lap()
            self._spare = self._target.commit(self._spare)
            self._staging.bind(self._target.tensors())
            dense["commit_s"] = clock.lap()
        dist.barrier()
        return same

    def _update(self) -> dict[str, Any]:
        """An update of a run with deltas, until this rank has sent or proven its part."""
        self._number += 1
        return self._sent(self._source) if self._source is not None else self._received()

    def _sent(self, source: DeltaEncoder) -> dict[str, Any]:
        """A trainer rank's part: what `asyncmoe.weights.sender.sender.Sender` does."""
        clock = Clock()
        mine = offer(source, self._plan, self._version)
        encoding = clock.lap()
        base = self._agreed(mine)
        agreeing = clock.lap()
        if base is None:
            self._exchanger.bind(self._held, {})
        self._exchanger.run(self._limit, encoder=None if base is None else source)
        coded = {str(rank): sum(part.sizes) for rank, part in mine.parts.items()}
        counts = {"changed": mine.changed, "elements": mine.elements, "coded": coded}
        return {"encode": encoding, "agree": agreeing, "send": clock.lap(), **counts}

    def _agreed(self, mine: Offer) -> int | None:
        """Return the base of the update, which rank 0 decides."""
        store, number = self._store, self._number
        if self._rank != 0:
            store.put(protocol.offer(number, self._rank), mine)
            return store.get(protocol.header(number), self._limit).base
        keys = {protocol.offer(number, rank): f"trainer rank {rank}" for rank in range(1, self._case.trainers)}
        found = store.get_all(keys, self._limit)
        offers = {0: mine} | {rank: found[key] for rank, key in enumerate(keys, 1)}
        base = common_base(offers)
        for rank, coming in comings(offers, protocol.engine_ranks(self._terms), base).items():
            store.put(protocol.coming(number, rank), coming)
        store.put(protocol.header(number), Header(self._version, _CHANNEL, base=base))
        return base

    def _received(self) -> dict[str, Any]:
        """An engine rank's part: what `asyncmoe.weights.receiver.worker` does."""
        staging, clock = self._staging, Clock()
        assert staging is not None
        header, coming = self._told()
        waiting = clock.lap()
        if header.base is None:
            if self._version:
                raise InvariantBroken(f"version {self._version} comes in full, expected a delta")
            staging.forget()
            self._spare = self._target.room()
            self._exchanger.bind({}, self._spare)
            self._exchanger.run(self._limit)
            carrying = clock.lap()
            staging.bind(self._spare)
            staging.adopt(header.version, coming.digests)
            return {"wait": waiting, "carry": carrying, "prove": clock.lap()}
        receive(staging, self._exchanger, header, coming, self._terms)
        carrying = self._exchanger.carried_s
        return {"wait": waiting, "carry": carrying, "prove": clock.lap() - carrying}

    def _told(self) -> tuple[Header, Coming]:
        store, number = self._store, self._number
        return store.get(protocol.header(number), self._limit), store.get(protocol.coming(number, self._rank), self._limit)

    def _proven(self) -> bool:
        """Whether the weights of an engine host have the digest that the trainers' have, both read anew, and are bit for bit what the same
        changes make of the first version, applied here."""
        self._number += 1
        if self._source is not None:
            self._source.forget()  # so that it offers everything, which reads its weights, not what it sent
            self._agreed(offer(self._source, self._plan, self._version))
            return True
        _, coming = self._told()
        live = self._target.tensors()
        self._spare = {}
        anew = DeltaDecoder(self._plan, self._rank, bucket_bytes=self._terms.bucket_bytes, threads=1)
        anew.bind(live)
        anew.adopt(self._version, coming.digests)  # raises where they differ
        self._exchanger.bind({}, live)  # it kept the second copy, in whose place this comes
        wanted = numbered(self._layout)
        for version, percent in self._drawn:
            change(self._layout, self._shapes, wanted, version, percent)
        return all(torch.equal(_bits(live[name]), _bits(tensor)) for name, tensor in _tensors(wanted).items())


def _terms(case: Case, timeout_s: float, bucket_bytes: int) -> Terms:
    firsts = range(case.trainers, case.world, case.tp)
    engines = tuple(EngineRanks(f"engine.{number}", case.tp, 1, first) for number, first in enumerate(firsts))
    return Terms(
        hf=case.hf,
        adapter=None,
        trainer=case.trainer,
        engines=engines,
        dtype=DTYPE,
        engine_dtype=DTYPE,
        transport="gloo",
        session="",
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
        delta=True,
    )


def _tensors(arrays: Mapping[str, np.ndarray]) -> Tensors:
    """The arrays' memory, as tensors of the weights' dtype."""
    return {name: torch.from_numpy(array.view(np.int16)).view(getattr(torch, DTYPE)) for name, array in arrays.items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def _model(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module with the tensors as its parameters, of their names."""
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return model
