"""The meeting of a trainer's ranks with the receivers inside the engines, before the first weights move."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, WeightSyncError
from asyncmoe.models import engine_dtype
from asyncmoe.receiver import handshake, meeting, route
from asyncmoe.receiver.channel import transport_for
from asyncmoe.receiver.meeting import AdapterTerms, EngineRanks, Outcome, Ready, Store, Terms
from asyncmoe.reshard import Plan
from asyncmoe.trainer.model import Model
from asyncmoe.wire.client import Client
from asyncmoe.wire.messages import Engines, EnginesAsk, WeightsJoin

_HOST = "127.0.0.1"
_GROUP = "asyncmoe_weights"
_WORDS, _PORT = 2048, 4
GRACE_S = 10.0
"""By how much ranks wait longer for rank 0 than rank 0 for them, so that all hear its reason."""


@dataclass(frozen=True, eq=False)
class Meeting:
    """What the ranks have agreed on, and where they go on talking."""

    store: Store
    terms: Terms
    plan: Plan


def meet(config: Config, model: Model, client: Client) -> Meeting:
    """Collective over the trainer's ranks: all ranks, engines' included, plan the same, and the engines' parameters are what the
    layouts say.

    Args:
        client: used on rank 0 only.

    Raises:
        WeightSyncError: naming each parameter that differs, or who has not come; with the same words on every rank.
    """
    rank, wait_s = model.mesh.rank, config.sync.timeout_s
    store = _open(config, model, client)
    terms = store.get("terms", Terms, wait_s)
    failure = ""
    plan: Plan | None = None
    try:
        plan = route.route(terms, rank)
    except AsyncmoeError as error:
        failure = str(error)
    mine = Ready(failure, plan.digest if plan else "")
    if rank == 0:
        store.put("verdict", Outcome(_disagreement(store, terms, mine, wait_s)))
    else:
        store.put(f"ready/{rank}", mine)
    heed(store.get("verdict", Outcome, 2 * wait_s))
    assert plan is not None
    return Meeting(store, terms, plan)


def heed(outcome: Outcome) -> None:
    """Raises WeightSyncError for an outcome that is none."""
    if outcome.failure:
        raise WeightSyncError(outcome.failure)


def _open(config: Config, model: Model, client: Client) -> Store:
    """Rank 0 makes the store and has the engines' receivers come to it; every rank gets its own way into it."""
    rank, wait_s = model.mesh.rank, config.sync.timeout_s
    if rank == 0:
        number, failure = 0, "rank 0 has failed"
        try:
            store, number = _keep(config, model, client)
        except AsyncmoeError as error:
            failure = str(error)
            raise
        finally:
            _tell(number, failure)
        return store
    number, failure = _tell()
    if not number:
        raise WeightSyncError(failure)
    return Store(_GROUP, rank, _HOST, number, wait_s)


def _tell(port: int = 0, failure: str = "") -> tuple[int, str]:
    """From rank 0 to all: the store's port, or why there is none, so that every rank ends with the same words."""
    words = failure.encode()[: _WORDS - _PORT]
    told = torch.zeros(_WORDS, dtype=torch.uint8)
    told[:_PORT] = torch.tensor(list(port.to_bytes(_PORT, "little")), dtype=torch.uint8)
    told[_PORT : _PORT + len(words)] = torch.tensor(list(words), dtype=torch.uint8)
    dist.broadcast(told, src=0)
    got = bytes(told.tolist())
    return int.from_bytes(got[:_PORT], "little"), got[_PORT:].rstrip(b"\0").decode(errors="replace")


def _keep(config: Config, model: Model, client: Client) -> tuple[Store, int]:
    world, sync, start_s = model.mesh.world, config.sync, config.engines.start_timeout_s
    engines = client.ask(EnginesAsk(start_s), start_s + GRACE_S)[0]
    assert isinstance(engines, Engines)
    listener = meeting.listen(_HOST)
    port = int(listener.getsockname()[1])
    store = Store(_GROUP, 0, _HOST, port, sync.timeout_s, listener)
    ranks = tuple(EngineRanks(e.name, e.tp, e.ep, world + e.rank_offset - 1) for e in engines.engines)
    terms = Terms(
        hf=dict(model.hf),
        adapter=_adapter(model),
        trainer=asdict(model.parallel),
        engines=ranks,
        dtype=str(model.dtype).removeprefix("torch."),
        engine_dtype=engine_dtype(model.hf, config.engines),
        transport=transport_for(sync.transport, model.mesh.backend == "nccl"),
        session=secrets.token_hex(8),
        staging=sync.staging,
        bucket_bytes=sync.bucket_bytes,
        timeout_s=sync.timeout_s,
    )
    store.put("terms", terms)
    client.ask(WeightsJoin(_HOST, port, _GROUP, "gloo", "reshard", world), sync.timeout_s + GRACE_S)
    return store, port


def _adapter(model: Model) -> AdapterTerms | None:
    section = model.adapter
    return None if section is None else AdapterTerms(section.targets, section.rank, section.alpha, section.experts)


def _disagreement(store: Store, terms: Terms, mine: Ready, wait_s: float) -> str:
    """Why weights cannot be sent; empty when they can."""
    engines = meeting.engine_ranks(terms)
    names = {rank: f"trainer rank {rank}" for rank in range(1, terms.engines[0].first)} | engines
    try:
        found = store.get_all({f"ready/{rank}": whom for rank, whom in names.items()}, Ready, wait_s)
    except AsyncmoeError as error:
        return str(error)
    ready = {0: mine} | {rank: found[f"ready/{rank}"] for rank in names}
    failures = [f"{({0: 'trainer rank 0'} | names)[rank]}: {one.failure}" for rank, one in ready.items() if one.failure]
    return handshake.refusal(failures or _differences(terms, ready, names))


def _differences(terms: Terms, ready: Mapping[int, Ready], names: Mapping[int, str]) -> list[str]:
    layouts = {layout.rank: layout for layout in route.engine_layouts(terms)}
    wrong = [f"{whom} has planned otherwise than rank 0" for rank, whom in names.items() if ready[rank].plan != ready[0].plan]
    for engine in terms.engines:
        for tp in range(engine.tp):
            rank = engine.first + tp
            wrong += handshake.differences(ready[rank], engine, tp, layouts[rank])
    return wrong
