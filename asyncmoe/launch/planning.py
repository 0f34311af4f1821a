"""`asyncmoe plan`: what moving a model's weights from a trainer to its engines will take, from its configuration alone."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table as Grid

from asyncmoe.config.lora import LoraSection
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.launch.memory import TrainerMemory, engine_weights, trainer_memory
from asyncmoe.models import EngineParallel, MegatronParallel, family_of, load_hf_config
from asyncmoe.models.lora import halves
from asyncmoe.models.lora.adapter import Kind, kind_of
from asyncmoe.models.payload import Payload
from asyncmoe.reshard.layout import ITEM_BYTES, RankLayout
from asyncmoe.reshard.match import Match, Sources
from asyncmoe.reshard.plan import assemble
from asyncmoe.reshard.relay import relay_matches
from asyncmoe.reshard.table import DTYPE, DTYPE_BYTES, EXTENT, NO_TENSOR, START, TENSOR, Table, enumerate_tensors, tabulate

_TRAINER = {key: key for key in ("tp", "pp", "ep", "etp", "dp", "vpp")} | {"first": "first_layers", "last": "last_layers"}
"""Field of MegatronParallel by what it is called here."""
_ENGINES = re.compile(r"(?P<engines>\d+)xtp(?P<tp>\d+)(?:ep(?P<ep>\d+))?(?:dp(?P<dp>\d+))?(?:pp(?P<pp>\d+))?", re.ASCII)
_ENGINE = ("tp", "ep", "dp", "pp")
_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Speeds:
    """Gigabytes (1e9) a second that one rank can send while it receives as much."""

    nvlink: float = 450.0
    nic: float = 50.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name}", got=value, expected="a positive number of GB/s")


@dataclass(frozen=True)
class Spread:
    """Bytes of the ranks of one side."""

    least: int
    mean: float
    most: int


@dataclass(frozen=True)
class Way:
    """One way to bring the weights to all engines.

    Attributes:
        bytes_wire: that travel between ranks, in all.
        ratio: bytes_wire over the lower bound.
        sent, received: by the trainer's ranks, by the engines' ranks.
        passed_on: by the engines' ranks to others.
        imbalance: what the busiest trainer rank sends, over the mean.
        messages: of the rank that sends or receives the most of them.
        buckets: of the rank that sends or receives the most bytes.
        plan_seconds: for one rank, all layouts included: measured here, the slowest of the ranks tried.
        nic_seconds, nvlink_seconds: for the busiest rank's bytes, round after round, at that speed. Packing, unpacking and
            whatever the network does not deliver come on top.
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
    """What `asyncmoe plan` reports.

    Attributes:
        adapter: what is moved in place of the weights, if anything is.
        model_bytes: the checkpoint's, or the adapter's.
        trainer_memory, engine_weights: bytes of the ranks that have the most; None where an adapter is moved.
        lower_bound: bytes that have to reach the engines: every rank's distinct elements, once.
        ways: "direct": from the trainer to every engine; with several engines also "relay": engines pass on to their replicas.
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
    trainer_memory: TrainerMemory | None
    engine_weights: int | None
    lower_bound: int
    ways: Mapping[str, Way]


def parse_trainer(text: str) -> MegatronParallel:
    """`tp=2,pp=2,ep=8,dp=4`; what is left out is 1. `vpp=2`: two model chunks a stage. `first=3`, `last=5`: layers of the first and the
    last pipeline stage. `te` alone: parameter names as Transformer Engine has them.

    Raises:
        ConfigError: anything else, and sizes that do not fit each other.
    """
    sizes: dict[str, Any] = {}
    te = False
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key == "te" and not value:
            te = True
        elif key not in _TRAINER or _TRAINER[key] in sizes or not (value.isascii() and value.isdigit()):
            raise ConfigError("--trainer", got=repr(part), expected=f"sizes like tp=2,pp=2,ep=8,dp=4 (each of {', '.join(_TRAINER)} once)")
        else:
            sizes[_TRAINER[key]] = int(value)
    return MegatronParallel(te=te, **sizes)


def parse_engines(text: str) -> tuple[int, EngineParallel]:
    """`4xtp8` or `4xtp8ep2dp2pp2`: number of engines, and the sizes of each: tensor, expert, data-parallel attention, pipeline.

    Raises:
        ConfigError: anything else, and sizes that do not fit each other.
    """
    found = _ENGINES.fullmatch(text.strip())
    if not found or int(found["engines"]) < 1:
        raise ConfigError("--engines", got=repr(text), expected="engines x sizes, like 4xtp8, 16xtp8ep8 or 2xtp8ep8dp8pp2")
    sizes: dict[str, Any] = {key: int(found[key] or 1) for key in _ENGINE}
    return int(found["engines"]), EngineParallel(**sizes)


def parse_adapter(text: str) -> Kind:
    """`rank=32`, `rank=32,experts=shared_outer,targets=q_proj+v_proj`; without targets: all.

    Raises:
        ConfigError: anything else.
    """
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if not given.keys() <= {"rank", "experts", "targets"} or "rank" not in given:
        raise ConfigError("--lora", got=repr(text), expected="rank=32, and experts=shared_outer or targets=q_proj+v_proj if wanted")
    values: dict[str, Any] = {**given, "targets": given["targets"].split("+")} if "targets" in given else given
    try:
        section = LoraSection.model_validate(values)
    except ValidationError as error:
        raise ConfigError("--lora", got=repr(text), expected=error.errors()[0]["msg"]) from None
    return kind_of(section)


def forecast(
    model: Path, trainer: str, engines: str, *, dtype: str, bucket_bytes: int, speeds: Speeds, lora: str | None = None
) -> Forecast:
    """Plan for all engines, in every way there is.

    Args:
        model: a directory with a config.json, or such a file.
        dtype: of all that is moved, as torch prints it without the prefix.
        lora: move an adapter of this kind (`parse_adapter`) in place of the weights.

    Raises:
        ConfigError: sizes that cannot be.
        DataError: no readable configuration.
        UserError: a model family that is not supported.
    """
    if bucket_bytes < 1:
        raise ConfigError("--bucket-bytes", got=bucket_bytes, expected="a positive number of bytes")
    if dtype not in ITEM_BYTES:
        raise ConfigError("--dtype", got=repr(dtype), expected=f"one of {', '.join(ITEM_BYTES)}")
    grid, (count, engine) = parse_trainer(trainer), parse_engines(engines)
    if grid.world + count * engine.world > _MOST_RANKS:
        raise ConfigError(
            "--trainer and --engines", got=f"{grid.world + count * engine.world} ranks in all", expected=f"at most {_MOST_RANKS}"
        )
    hf = load_hf_config(model)
    family_of(hf).check(hf, grid, engine)
    adapter = None if lora is None else parse_adapter(lora)
    if adapter is not None:
        halves.check(adapter, family_of(hf).shape_of(hf))
    case = _Case(Payload(hf, adapter), grid, engine, count, dtype)
    direct = case.direct()
    ways = {"direct": case.way(direct[0], direct[1], bucket_bytes, speeds)}
    if count > 1:
        ways["relay"] = case.way(*case.relay(), bucket_bytes, speeds)
    bound = sum(case.needed(direct[0][0]))
    return Forecast(
        model=str(model),
        adapter=adapter,
        model_bytes=sum(math.prod(shape) for shape in case.payload.tensors().values()) * ITEM_BYTES[dtype],
        trainer=grid,
        trainer_ranks=grid.world,
        engine=engine,
        engines=count,
        engine_ranks=count * engine.world,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        speeds=speeds,
        trainer_memory=None if adapter else trainer_memory(case.payload.trainer(grid, dtype), grid),
        engine_weights=None if adapter else engine_weights(case.payload.engines(engine, dtype)),
        lower_bound=bound,
        ways={name: replace(way, ratio=way.bytes_wire / bound) for name, way in ways.items()},
    )


@dataclass(frozen=True)
class _Case:
    """What is moved, a trainer and engines. The trainer's ranks come first, then the engines'."""

    payload: Payload
    trainer: MegatronParallel
    engine: EngineParallel
    engines: int
    dtype: str

    @property
    def all_engine_ranks(self) -> int:
        return self.engines * self.engine.world

    def direct(self) -> tuple[tuple[Match, ...], float]:
        """The match, and the seconds it took from the configuration on."""
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
        """The figures of some rounds that took `seconds` to match; `ratio` is left open."""
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
        """Bytes of the distinct elements of every engine rank."""
        side = match.side
        return [_distinct_bytes(side.tables[number]) for number in side.table_of.tolist()]

    def _layouts(self) -> tuple[Mapping[str, tuple[int, ...]], list[RankLayout], list[RankLayout]]:
        source = self.payload.trainer(self.trainer, self.dtype)
        destination = self.payload.engines(self.engine, self.dtype, self.engines, first=self.trainer.world)
        return self.payload.tensors(), source, destination

    def _slowest_part(self, matches: Sequence[Match]) -> float:
        """Seconds for a rank's part and the digest: the most of the first and last ranks of either side."""
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
    """Bytes of a table's elements, those of equal boxes counted once."""
    pieces = table.pieces[table.pieces[:, TENSOR] != NO_TENSOR]
    _, first = np.unique(np.column_stack([pieces[:, TENSOR], pieces[:, START], pieces[:, EXTENT]]), axis=0, return_index=True)
    return int((pieces[first][:, EXTENT].prod(1) * DTYPE_BYTES[pieces[first][:, DTYPE]]).sum())


def _spread(nbytes: np.ndarray) -> Spread:
    return Spread(int(nbytes.min()), float(nbytes.mean()), int(nbytes.max()))


def show(found: Forecast, console: Console) -> None:
    """Print a forecast as a table."""
    console.print(_title(found), highlight=False)
    grid = Grid(show_edge=False)
    grid.add_column("")
    for name in found.ways:
        grid.add_column(name, justify="right")
    for label, values in _lines(found):
        grid.add_row(label, *values)
    console.print(grid)
    if found.trainer_memory is not None and found.engine_weights is not None:
        console.print(_memory(found.trainer_memory, found.engine_weights), highlight=False)
    console.print("Times are those of the wire alone: the busiest rank's bytes at that speed, in both directions at once.")


def _memory(trainer: TrainerMemory, engine: int) -> str:
    return (
        f"memory of a trainer rank: weights {_size(trainer.weights)}, gradients {_size(trainer.gradients)}, "
        f"Adam {_size(trainer.optimizer)}, or {_size(trainer.optimizer_distributed)} shared out over data-parallel ranks\n"
        f"memory of an engine rank: weights {_size(engine)}, and as much again to receive the next version in"
    )


def _title(found: Forecast) -> str:
    trainer = _sizes(found.trainer, {name: field for field, name in _TRAINER.items()}, ("tp", "pp", "ep", "etp", "dp"))
    engine = _sizes(found.engine, {name: name for name in _ENGINE}, ("tp", "ep"))
    return (
        f"{found.model}: {_size(found.model_bytes)} of {found.dtype}{_adapter(found.adapter)}\n"
        f"trainer {found.trainer_ranks} ranks ({trainer}) -> {found.engines} engines, {found.engine_ranks} ranks ({engine} each)\n"
        f"lower bound {_size(found.lower_bound)}"
    )


def _adapter(kind: Kind | None) -> str:
    return "" if kind is None else f", an adapter of rank {kind.rank} ({kind.experts}: {', '.join(kind.targets)})"


def _sizes(parallel: MegatronParallel | EngineParallel, called: Mapping[str, str], always: Sequence[str]) -> str:
    """The sizes of a grid under the names they are `called`; those not in `always` only where they are not the default."""
    plain = type(parallel)()
    shown = [field for field in called if field in always or getattr(parallel, field) != getattr(plain, field)]
    return ", ".join(f"{called[field]} {getattr(parallel, field)}" for field in shown)


def _lines(found: Forecast) -> list[tuple[str, list[str]]]:
    ways = list(found.ways.values())
    return [
        ("bytes on the wire", [_size(way.bytes_wire) for way in ways]),
        ("over the lower bound", [f"{way.ratio:.3f}" for way in ways]),
        ("sent by a trainer rank, mean", [_size(way.sent.mean) for way in ways]),
        ("sent by a trainer rank, most", [_size(way.sent.most) for way in ways]),
        ("imbalance of the trainer ranks", [f"{way.imbalance:.3f}" for way in ways]),
        ("received by an engine rank, most", [_size(way.received.most) for way in ways]),
        ("passed on by an engine rank, most", [_size(way.passed_on.most) for way in ways]),
        (f"buckets of {_size(found.bucket_bytes)} of the busiest rank", [str(way.buckets) for way in ways]),
        ("messages of the busiest rank", [str(way.messages) for way in ways]),
        ("plan time per rank", [f"{way.plan_seconds:.2f} s" for way in ways]),
        (f"expected at {found.speeds.nic:g} GB/s (NIC)", [f"{way.nic_seconds:.3g} s" for way in ways]),
        (f"expected at {found.speeds.nvlink:g} GB/s (NVLink)", [f"{way.nvlink_seconds:.3g} s" for way in ways]),
    ]


def _size(nbytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def write(found: Forecast, file: Path) -> None:
    """Write a forecast as JSON.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        file.write_text(json.dumps(asdict(found), indent=2) + "\n")
    except OSError as error:
        raise DataError(str(file), got=error.strerror, expected="a file that can be written") from error
