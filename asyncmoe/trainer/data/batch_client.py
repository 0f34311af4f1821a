"""Leases batches, fetches trajectories and builds this rank's micro-batches.

Pure functions, the same on every rank, choose what to fetch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncmoe.config import Config
from asyncmoe.errors import ProtocolError, WaitTimeout
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.item import Item
from asyncmoe.rpc.messages import Lease, Leased, Phase
from asyncmoe.telemetry import heartbeats
from asyncmoe.trainer.data import batch, trees
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.data.microbatches import MicroBatches
from asyncmoe.trainer.data.schedule import Ranks, Schedule, schedule, split_updates
from asyncmoe.trainer.data.shared_fetch import shared
from asyncmoe.trainer.model.mesh import Mesh
from asyncmoe.trajectory import Buffer, Routing, Trajectory, decode, frames_in

_PATIENCE_S = 2.0
"""Longest wait of a single lease request, in seconds; the request is then repeated."""
Fetch = Callable[[Sequence[Item], tuple[int, ...] | None, bool], Sequence[Buffer]]
"""(leased items, layers, masks) -> the items' frames in order; layers and masks as in `WorkerFetch`."""


@dataclass(frozen=True)
class Update:
    """The part of a batch that one optimizer step trains on."""

    members: tuple[int, ...]
    """Positions of its trajectories in the batch."""
    schedule: Schedule
    """The schedule over these positions."""
    weights: Mapping[int, float]
    """For each of these positions, the loss weight of a sampled token."""


def plan_updates(
    items: Sequence[Item], phase: Phase, config: Config, mesh: Mesh, width: int, recorded: Sequence[Ranks] = ()
) -> list[Update]:
    """Split a batch into optimizer steps, and each step into micro-batches.

    Args:
        width: as for `asyncmoe.trainer.data.schedule.cost`.
        recorded: the micro-batches of each update, as an earlier training on the batch had them; empty: plan them.
    """
    trainer, aggregation, parts = config.trainer, config.objective.aggregation, [list(range(len(items)))]
    if phase == "rl":
        parts = split_updates([item.group for item in items], config.objective.updates_per_batch)
    made = []
    for number, part in enumerate(parts):
        chosen = [items[i] for i in part]
        planned = schedule([item.tokens for item in chosen], mesh.dp, trainer.tokens_per_microbatch, trainer.pack, mesh.grid, width)
        ranks = tuple(tuple(tuple(part[i] for i in indices) for indices in rank) for rank in planned.ranks)
        ranks = recorded[number] if recorded else ranks
        weights = trees.token_weights(chosen, aggregation if phase == "rl" else "token_mean", config.rollout.max_new_tokens)
        made.append(Update(tuple(part), replace(planned, ranks=ranks), dict(zip(part, weights.tolist(), strict=True))))
    return made


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
    mine, least = update.schedule.ranks[mesh.dp_rank], update.schedule.rows
    lengths = [[len(trajectories[i]) for i in indices] for indices in mine]

    def make(number: int) -> MicroBatch:
        return batch.pack(
            trajectories,
            mine[number],
            advantages=advantages,
            weights=update.weights,
            grid=mesh.grid,
            packed=config.trainer.pack,
            rows=least,
            cp_rank=mesh.cp_rank,
            proximal=proximal,
            reference=reference,
            routing=routing,
        )

    rows = [batch.rows_of(of, mesh.grid, least) for of in lengths]
    return MicroBatches(make, rows, [batch.places_of(indices, of, mesh.grid) for indices, of in zip(mine, lengths, strict=True)])


def lease(
    client: Client, config: Config, step: int, phase: Phase, check: Callable[[], None], together: Callable[[bool], bool] = lambda got: got
) -> Leased:
    """Lease the batch of step `step`; every rank gets the same answer.

    Args:
        check: called periodically; an exception it raises ends the wait.
        together: returns whether any rank has the batch, given whether this one has; may be collective.

    Raises:
        WaitTimeout: the engines produced no batch within `queue.lease_timeout_s`.
    """
    until = time.monotonic() + config.queue.lease_timeout_s
    while True:
        check()
        heartbeats.beat(f"waiting for the batch of step {step + 1}")
        reply = _asked(client, config, step, phase, min(_PATIENCE_S, max(0.0, until - time.monotonic())))
        if together(got := bool(reply.items or reply.stop)):
            return reply if got else _asked(client, config, step, phase, _PATIENCE_S)
        if time.monotonic() >= until:
            raise WaitTimeout("the engines", f"a batch for step {step}", config.queue.lease_timeout_s)


def stopping(client: Client, config: Config, step: int, phase: Phase) -> bool:
    """Return whether the run is to stop before step `step`, without waiting. The same answer on every rank."""
    return _asked(client, config, step, phase, 0.0).stop


def _asked(client: Client, config: Config, step: int, phase: Phase, wait_s: float) -> Leased:
    count = config.rollout.batch if phase == "rl" else config.warmup.batch
    reply = client.ask(Lease(step, phase, count, version=step, wait_s=wait_s), wait_s + ANSWER_S)[0]
    assert isinstance(reply, Leased)
    return reply


def fetch(ask: Fetch, mesh: Mesh, leased: Leased, wanted: Sequence[int], layers: tuple[int, ...], masks: bool) -> dict[int, Trajectory]:
    """Fetch the trajectories at the given positions of a leased batch, once for all ranks that train on them (`Mesh.replica_group`).
    Collective over these ranks.

    Args:
        wanted, layers, masks: the same on all ranks of the group.
        layers: numbers of the layers whose routes this rank needs.
        masks: whether this rank needs sampling masks.
    """
    if not wanted:
        return {}
    items, each, found = [leased.items[i] for i in wanted], frames_in(1), {}
    frames = shared(mesh, len(items) * each, lambda: ask(items, layers, masks))
    for place, (i, item) in enumerate(zip(wanted, items, strict=True)):
        found[i] = decode(frames[place * each : (place + 1) * each])
        if found[i].key != item.key:
            raise ProtocolError(f"fetch: got trajectory {found[i].key}, expected {item.key}")
    return found
