"""Leases batches, fetches trajectories and builds this rank's micro-batches.

Pure functions, the same on every rank, choose what to fetch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.config import Config
from asyncmoe.errors import ProtocolError, WaitTimeout
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Lease, Leased, Phase
from asyncmoe.telemetry import heartbeats
from asyncmoe.trainer.data import batch, held, trees
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.data.joined import Joined
from asyncmoe.trainer.data.microbatches import MicroBatches
from asyncmoe.trainer.data.prefetch import FetchedAhead, Prefetcher, completed
from asyncmoe.trainer.data.schedule import Schedule, schedule, split_updates
from asyncmoe.trainer.data.shared_fetch import shared
from asyncmoe.trainer.model.mesh import Mesh
from asyncmoe.trajectory import Buffer, Routing, Trajectory, decode, frames_in

_PATIENCE_S = 2.0
"""Longest wait of one lease request; lease requests may be repeated."""


@dataclass(frozen=True)
class Update:
    """One optimizer step's share of a batch."""

    members: tuple[int, ...]
    """Positions in the batch; `schedule` indexes into this tuple."""
    schedule: Schedule
    weights: np.ndarray
    """float64[len(members)]: loss weight of a sampled token of each member."""


def plan_updates(items: Sequence[Item], phase: Phase, config: Config, mesh: Mesh, width: int) -> list[Update]:
    """Split a batch into optimizer steps, and each step into micro-batches.

    Args:
        width: as for `asyncmoe.trainer.data.schedule.cost`.
    """
    if phase == "rl":
        parts = split_updates([item.group for item in items], config.objective.updates_per_batch)
    else:
        parts = [list(range(len(items)))]
    aggregation = config.objective.aggregation if phase == "rl" else "token_mean"
    trainer = config.trainer
    return [
        Update(
            tuple(part),
            schedule([items[i].tokens for i in part], mesh.dp, trainer.tokens_per_microbatch, trainer.pack, mesh.grid, width),
            trees.token_weights([items[i] for i in part], aggregation, config.rollout.max_new_tokens),
        )
        for part in parts
    ]


def microbatches(
    update: Update,
    trajectories: Mapping[int, Trajectory],
    advantages: Mapping[int, np.ndarray],
    config: Config,
    mesh: Mesh,
    routing: Routing | None = None,
    proximal: Mapping[int, np.ndarray] | None = None,
    reference: Mapping[int, np.ndarray] | None = None,
) -> MicroBatches:
    """Return this rank's micro-batches of an update.

    Args:
        trajectories: by position in the batch; must include the trajectories this rank trains on.
        advantages: float32[T] by position in the batch, for the same trajectories (`credit.token_advantages`).
        routing: routing of the layers this rank replays, if routing is kept.
        proximal, reference: log-probabilities by position in the batch, or None.
    """
    members, planned = update.members, update.schedule
    mine = planned.ranks[mesh.dp_rank]
    lengths = [[len(trajectories[members[i]]) for i in indices] for indices in mine]

    def make(number: int) -> MicroBatch:
        indices = mine[number]
        return batch.pack(
            {i: trajectories[members[i]] for i in indices},
            indices,
            advantages={i: advantages[members[i]] for i in indices},
            weights=update.weights,
            grid=mesh.grid,
            packed=config.trainer.pack,
            rows=planned.rows,
            cp_rank=mesh.cp_rank,
            proximal=None if proximal is None else {i: proximal[members[i]] for i in indices},
            reference=None if reference is None else {i: reference[members[i]] for i in indices},
            routing=routing,
        )

    rows = [batch.rows_of(of, mesh.grid, planned.rows) for of in lengths]
    return MicroBatches(make, rows, [batch.places_of(indices, of, mesh.grid) for indices, of in zip(mine, lengths, strict=True)])


def mine(update: Update, mesh: Mesh) -> list[int]:
    """Return the batch positions that this rank trains on in an update."""
    return [update.members[i] for i in update.schedule.indices(mesh.dp_rank)]


def shares(updates: Sequence[Update], mesh: Mesh) -> list[int]:
    """Return the batch positions that this rank trains on in some updates, ascending."""
    return sorted({i for update in updates for i in mine(update, mesh)})


def lease(client: Client, config: Config, step: int, phase: Phase, check: Callable[[], None]) -> Leased:
    """Lease the batch of step `step`; every rank gets the same answer.

    Args:
        check: called periodically; an exception it raises ends the wait.

    Raises:
        WaitTimeout: the engines produced no batch within `queue.lease_timeout_s`.
    """
    count = config.rollout.batch if phase == "rl" else config.warmup.batch
    until = time.monotonic() + config.queue.lease_timeout_s
    while True:
        check()
        heartbeats.beat(f"waiting for the batch of step {step + 1}")
        wait_s = min(_PATIENCE_S, max(0.0, until - time.monotonic()))
        reply = client.ask(Lease(step, phase, count, version=step, wait_s=wait_s), wait_s + ANSWER_S)[0]
        assert isinstance(reply, Leased)
        if reply.items or reply.stop:
            return reply
        if time.monotonic() >= until:
            raise WaitTimeout("the engines", f"{count} episodes for step {step}", config.queue.lease_timeout_s)


def stopping(client: Client, config: Config, step: int, phase: Phase) -> bool:
    """Return whether the run is to stop before step `step`; waits for nothing. The same answer on every rank."""
    count = config.rollout.batch if phase == "rl" else config.warmup.batch
    reply = client.ask(Lease(step, phase, count, version=step, wait_s=0.0), ANSWER_S)[0]
    assert isinstance(reply, Leased)
    return reply.stop


def fetch(
    client: Client,
    mesh: Mesh,
    leased: Leased,
    wanted: Sequence[int],
    layers: tuple[int, ...] | None = None,
    masks: bool = True,
    ahead: Prefetcher | None = None,
) -> dict[int, Trajectory]:
    """Fetch the trajectories at the given positions of a leased batch, once for the ranks that train on them (`Mesh.replica_group`).
    Collective over these.

    Args:
        wanted, layers, masks: the same on all ranks of the group.
        layers: numbers of the layers whose routes this rank needs; None: all layers.
        masks: whether this rank needs sampling masks.
        ahead: has fetched some of them, with the same layers and masks; only the group's first rank is asked for it.
    """
    if not wanted:
        return {}
    items, each = [leased.items[i] for i in wanted], frames_in(1)
    ready: dict[str, FetchedAhead] = {}

    def send(keys: tuple[str, ...]) -> Sequence[Buffer]:
        wanted = set(keys)
        return held.fetch(client, [item for item in items if item.key in wanted], layers, masks)

    def ask() -> Sequence[Buffer] | Joined:
        if ahead is not None:
            ready.update(ahead.take(leased.step, items))
        return completed(items, ready, send)

    frames = shared(mesh, len(items) * each, ask)

    def decoded(place: int, item: Item) -> Trajectory:
        before = ready.get(item.key)
        made = before.decoded if before is not None else None
        made = decode(frames[place * each : (place + 1) * each]) if made is None else made
        if made.key != item.key:
            raise ProtocolError(f"fetch: got trajectory {made.key}, expected {item.key}")
        return made

    return {i: decoded(place, item) for place, (i, item) in enumerate(zip(wanted, items, strict=True))}
