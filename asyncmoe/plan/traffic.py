"""`asyncmoe plan`: traffic and time to move a model's weights from a trainer to its engines, from its configuration alone."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from asyncmoe.errors import ConfigError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.payload import Payload
from asyncmoe.plan.sizes import check_dtype
from asyncmoe.plan.updates import UpdateForecast, updates
from asyncmoe.reshard.layout import ITEM_BYTES
from asyncmoe.reshard.match import Match, Sources
from asyncmoe.reshard.plan import assemble
from asyncmoe.reshard.table import DTYPE, DTYPE_BYTES, EXTENT, NO_TENSOR, START, TENSOR, Table, enumerate_tensors, tabulate

_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Speeds:
    """Gigabytes (1e9 bytes) per second that a rank can send while it receives at the same rate; `hbm`: that a GPU reads or writes."""

    nvlink: float = 450.0
    nic: float = 50.0
    hbm: float = 3000.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name}", got=value, expected="a positive number of GB/s")


@dataclass(frozen=True)
class Spread:
    """Bytes per rank of one side."""

    least: int
    mean: float
    most: int


@dataclass(frozen=True)
class Way:
    """What it costs to send the weights to all engines.

    Attributes:
        bytes_wire: total bytes between ranks.
        ratio: bytes_wire over the lower bound.
        sent, received: bytes that trainer ranks send, and that engine ranks receive.
        imbalance: bytes sent by the busiest trainer rank, over the mean.
        messages: messages of the rank that sends or receives the most messages.
        buckets: buckets of the rank that sends or receives the most bytes.
        plan_seconds: planning time of one rank including all layouts, measured on this machine: the slowest of the ranks tried.
        nic_seconds, nvlink_seconds: time of the busiest rank's bytes at that speed. Excludes packing, unpacking and any shortfall of
            the network.
    """

    bytes_wire: int
    ratio: float
    sent: Spread
    received: Spread
    imbalance: float
    messages: int
    buckets: int
    plan_seconds: float
    nic_seconds: float
    nvlink_seconds: float


@dataclass(frozen=True)
class Forecast:
    """The traffic report of `asyncmoe plan`.

    Attributes:
        adapter: the adapter that is moved in place of the weights, if any.
        model_bytes: bytes of the checkpoint or the adapter.
        lower_bound: bytes that must reach the engines: the distinct elements of every rank, once.
        way: what a full update of all engines takes.
        updates: what updates take; empty for adapters, which are sent whole.
    """

    model: str
    adapter: Kind | None
    model_bytes: int
    trainer: MegatronParallel
    trainer_ranks: int
    engine: EngineParallel
    engines: int
    engine_ranks: int
    dtype: str
    bucket_bytes: int
    speeds: Speeds
    lower_bound: int
    way: Way
    updates: tuple[UpdateForecast, ...] = ()


def foresee(
    model: str,
    hf: Mapping[str, Any],
    grid: MegatronParallel,
    engine: EngineParallel,
    count: int,
    *,
    dtype: str = "bfloat16",
    bucket_bytes: int = 256 << 20,
    speeds: Speeds = Speeds(),
    adapter: Kind | None = None,
) -> Forecast:
    """Forecast the traffic from the trainer to all engines.

    Args:
        model: name of the model.
        hf: the model's Hugging Face configuration.
        dtype: dtype of the moved tensors, as torch prints it without the prefix.
        adapter: move such an adapter in place of the weights.

    Raises:
        ConfigError: impossible sizes.
        UserError: unsupported model family.
    """
    if bucket_bytes < 1:
        raise ConfigError("--bucket-bytes", got=bucket_bytes, expected="a positive number of bytes")
    check_dtype(dtype)
    if grid.world + count * engine.world > _MOST_RANKS:
        raise ConfigError(
            "--trainer and --engines", got=f"{grid.world + count * engine.world} ranks in all", expected=f"at most {_MOST_RANKS}"
        )
    family_of(hf).check(hf, grid, engine)
    case = _Case(Payload(hf, adapter), grid, engine, count, dtype)
    match, seconds = case.matched()
    bound = sum(_needed(match))
    way = case.way(match, seconds, bound, bucket_bytes, speeds)
    item = 1 if case.payload.float8 else ITEM_BYTES[dtype]
    return Forecast(
        model=model,
        adapter=adapter,
        model_bytes=case.payload.nbytes(dtype),
        trainer=grid,
        trainer_ranks=grid.world,
        engine=engine,
        engines=count,
        engine_ranks=count * engine.world,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        speeds=speeds,
        lower_bound=bound,
        way=way,
        updates=() if adapter else updates(way.received.most, way.bytes_wire, way.nic_seconds, item, speeds.hbm),
    )


@dataclass(frozen=True)
class _Case:
    """A payload, a trainer and engines. The trainer's ranks come first, then the engines'."""

    payload: Payload
    trainer: MegatronParallel
    engine: EngineParallel
    engines: int
    dtype: str

    @property
    def all_engine_ranks(self) -> int:
        return self.engines * self.engine.world

    def matched(self) -> tuple[Match, float]:
        """Return the match, and the seconds from configuration to match."""
        began = time.perf_counter()
        source = self.payload.trainer(self.trainer, self.dtype)
        destination = self.payload.engines(self.engine, self.dtype, self.engines, first=self.trainer.world)
        numbered = enumerate_tensors(self.payload.tensors())
        match = Match(Sources(numbered, tabulate(numbered, source)), tabulate(numbered, destination))
        return match, time.perf_counter() - began

    def way(self, match: Match, seconds: float, bound: int, bucket_bytes: int, speeds: Speeds) -> Way:
        """Return the costs of a match that took `seconds` to make.

        Args:
            bound: `Forecast.lower_bound`.
        """
        ranks = self.trainer.world + self.all_engine_ranks
        source, destination, nbytes = match.traffic().T
        sent, received = np.zeros((2, ranks), np.int64)
        np.add.at(sent, source, nbytes)
        np.add.at(received, destination, nbytes)
        messages = max(int(np.bincount(end).max()) for end in (source, destination))
        busiest = int(np.maximum(sent, received).max())
        by_trainer = sent[: self.trainer.world]
        return Way(
            bytes_wire=int(sent.sum()),
            ratio=float(sent.sum() / bound),
            sent=_spread(by_trainer),
            received=_spread(received[self.trainer.world :]),
            imbalance=float(by_trainer.max() / by_trainer.mean()),
            messages=messages,
            buckets=-(-busiest // bucket_bytes),
            plan_seconds=seconds + self._slowest_part(match),
            nic_seconds=busiest / 1e9 / speeds.nic,
            nvlink_seconds=busiest / 1e9 / speeds.nvlink,
        )

    def _slowest_part(self, match: Match) -> float:
        """Return the seconds for one rank's part plus the digest; the part is the slowest of the first and last ranks of both sides."""
        world = self.trainer.world
        slowest = 0.0
        for rank in (0, world - 1, world, world + self.all_engine_ranks - 1):
            began = time.perf_counter()
            assemble(match, [rank])
            slowest = max(slowest, time.perf_counter() - began)
        began = time.perf_counter()
        _ = match.digest
        return slowest + time.perf_counter() - began


def _needed(match: Match) -> list[int]:
    """Return the bytes of distinct elements of every engine rank."""
    return [_distinct_bytes(match.side.tables[number]) for number in match.side.table_of.tolist()]


def _distinct_bytes(table: Table) -> int:
    """Return the bytes of a table's elements, counting equal boxes once."""
    pieces = table.pieces[table.pieces[:, TENSOR] != NO_TENSOR]
    _, first = np.unique(np.column_stack([pieces[:, TENSOR], pieces[:, START], pieces[:, EXTENT]]), axis=0, return_index=True)
    return int((pieces[first][:, EXTENT].prod(1) * DTYPE_BYTES[pieces[first][:, DTYPE]]).sum())


def _spread(nbytes: np.ndarray) -> Spread:
    return Spread(int(nbytes.min()), float(nbytes.mean()), int(nbytes.max()))
