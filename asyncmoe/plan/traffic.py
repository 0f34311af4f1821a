"""`asyncmoe plan`: traffic and time to move a model's weights from a trainer to its engines, from its configuration alone."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncmoe.errors import ConfigError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of, load_hf_config, with_family
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.payload import Payload
from asyncmoe.plan.sizes import check_dtype, parse_adapter, parse_engines, parse_trainer
from asyncmoe.plan.updates import UpdateForecast, updates
from asyncmoe.reshard.layout import ITEM_BYTES, RankLayout
from asyncmoe.reshard.match import Match, Sources
from asyncmoe.reshard.plan import assemble
from asyncmoe.reshard.relay import relay_matches
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
    """One route of the weights to all engines, with its costs.

    Attributes:
        bytes_wire: total bytes between ranks.
        ratio: bytes_wire over the lower bound.
        sent, received: bytes that trainer ranks send, and that engine ranks receive.
        passed_on: bytes that engine ranks send to other engine ranks.
        imbalance: bytes sent by the busiest trainer rank, over the mean.
        messages: messages of the rank that sends or receives the most messages.
        buckets: buckets of the rank that sends or receives the most bytes.
        plan_seconds: planning time of one rank including all layouts, measured on this machine: the slowest of the ranks tried.
        nic_seconds, nvlink_seconds: time of the busiest rank's bytes at that speed, summed over rounds. Excludes packing, unpacking
            and any shortfall of the network.
    """

    bytes_wire: int
    ratio: float
    sent: Spread
    received: Spread
    passed_on: Spread
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
        ways: "direct": the trainer sends to every engine; with several engines also "relay": engines pass weights on to their replicas.
        updates: what updates take directly; empty for adapters, which are sent whole.
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
    ways: Mapping[str, Way]
    updates: tuple[UpdateForecast, ...] = ()


def forecast(
    model: Path,
    trainer: str,
    engines: str,
    *,
    dtype: str,
    bucket_bytes: int,
    speeds: Speeds,
    lora: str | None = None,
    family: str = "auto",
) -> Forecast:
    """Forecast every route for all engines.

    Args:
        model: a config.json or its directory.
        dtype: dtype of the moved tensors, as torch prints it without the prefix.
        lora: move an adapter of this kind (`parse_adapter`) in place of the weights.
        family: as `model.family`.

    Raises:
        ConfigError: impossible sizes.
        DataError: no readable configuration.
        UserError: unsupported model family.
    """
    grid, (count, engine) = parse_trainer(trainer), parse_engines(engines)
    hf = with_family(load_hf_config(model), family)
    adapter = None if lora is None else parse_adapter(lora, family_of(hf).shape_of(hf))
    return foresee(str(model), hf, grid, engine, count, dtype=dtype, bucket_bytes=bucket_bytes, speeds=speeds, adapter=adapter)


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
    """Forecast like `forecast`, from parsed sizes.

    Args:
        model: name of the model.
        hf: the model's Hugging Face configuration.

    Raises: as `forecast`.
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
    direct = case.direct()
    ways = {"direct": case.way(direct[0], direct[1], bucket_bytes, speeds)}
    if count > 1:
        ways["relay"] = case.way(*case.relay(), bucket_bytes, speeds)
    way, item = ways["direct"], 1 if case.payload.float8 else ITEM_BYTES[dtype]
    bound = sum(case.needed(direct[0][0]))
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
        ways={name: replace(one, ratio=one.bytes_wire / bound) for name, one in ways.items()},
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

    def direct(self) -> tuple[tuple[Match, ...], float]:
        """Return the match, and the seconds from configuration to match."""
        began = time.perf_counter()
        tensors, source, destination = self._layouts()
        numbered = enumerate_tensors(tensors)
        match = Match(Sources(numbered, tabulate(numbered, source)), tabulate(numbered, destination))
        return (match,), time.perf_counter() - began

    def relay(self) -> tuple[tuple[Match, ...], float]:
        began = time.perf_counter()
        matches = relay_matches(*self._layouts())
        return matches, time.perf_counter() - began

    def way(self, matches: Sequence[Match], seconds: float, bucket_bytes: int, speeds: Speeds) -> Way:
        """Return the costs of rounds that took `seconds` to match; the caller sets `ratio`."""
        ranks = self.trainer.world + self.all_engine_ranks
        sent, received = np.zeros((2, len(matches), ranks), np.int64)
        messages = np.zeros((2, ranks), np.int64)
        for number, match in enumerate(matches):
            source, destination, nbytes = match.traffic().T
            np.add.at(sent[number], source, nbytes)
            np.add.at(received[number], destination, nbytes)
            messages += np.stack([np.bincount(source, minlength=ranks), np.bincount(destination, minlength=ranks)])
        busiest = np.maximum(sent, received).max(1).sum() / 1e9
        by_trainer = sent[:, : self.trainer.world].sum(0)
        return Way(
            bytes_wire=int(sent.sum()),
            ratio=math.nan,
            sent=_spread(by_trainer),
            received=_spread(received[:, self.trainer.world :].sum(0)),
            passed_on=_spread(sent[:, self.trainer.world :].sum(0)),
            imbalance=float(by_trainer.max() / by_trainer.mean()),
            messages=int(messages.max()),
            buckets=-(-int(np.maximum(sent.sum(0), received.sum(0)).max()) // bucket_bytes),
            plan_seconds=seconds + self._slowest_part(matches),
            nic_seconds=float(busiest / speeds.nic),
            nvlink_seconds=float(busiest / speeds.nvlink),
        )

    def needed(self, match: Match) -> list[int]:
        """Return the bytes of distinct elements of every engine rank."""
        side = match.side
        return [_distinct_bytes(side.tables[number]) for number in side.table_of.tolist()]

    def _layouts(self) -> tuple[Mapping[str, tuple[int, ...]], list[RankLayout], list[RankLayout]]:
        source = self.payload.trainer(self.trainer, self.dtype)
        destination = self.payload.engines(self.engine, self.dtype, self.engines, first=self.trainer.world)
        return self.payload.tensors(), source, destination

    def _slowest_part(self, matches: Sequence[Match]) -> float:
        """Return the seconds for one rank's part plus the digest; the part is the slowest of the first and last ranks of both sides."""
        world = self.trainer.world
        slowest = 0.0
        for rank in (0, world - 1, world, world + self.all_engine_ranks - 1):
            began = time.perf_counter()
            for match in matches:
                assemble(match, [rank])
            slowest = max(slowest, time.perf_counter() - began)
        began = time.perf_counter()
        for match in matches:
            _ = match.digest
        return slowest + time.perf_counter() - began


def _distinct_bytes(table: Table) -> int:
    """Return the bytes of a table's elements, counting equal boxes once."""
    pieces = table.pieces[table.pieces[:, TENSOR] != NO_TENSOR]
    _, first = np.unique(np.column_stack([pieces[:, TENSOR], pieces[:, START], pieces[:, EXTENT]]), axis=0, return_index=True)
    return int((pieces[first][:, EXTENT].prod(1) * DTYPE_BYTES[pieces[first][:, DTYPE]]).sum())


def _spread(nbytes: np.ndarray) -> Spread:
    return Spread(int(nbytes.min()), float(nbytes.mean()), int(nbytes.max()))
