"""The least seconds of the moves with which trainer and engines change places on their devices: bytes over a bandwidth. In order:

    trainer_in   a trainer rank's parameters and optimizer state come from host memory; gradients begin at zero
    trainer_out  what a step changes goes there: the state before engines wake, the parameters after the update
    engines_in   an engine rank's shard of the new weights, read and written once; with adapters, also its base weights from host memory

Nothing overlaps: each needs the memory that the one before has freed. Engines lose their contents when they sleep, which moves no bytes;
their KV cache and graphs come back as empty pages, at addresses that the graphs know: a call, and no copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.config.devices import first_gpu
from asyncmoe.plan import budget, memory, phases, traffic
from asyncmoe.plan.memory import Hf
from asyncmoe.plan.traffic import Forecast

_REACHED = 0.9
"""Share of a data sheet's bandwidth that large copies can reach: packets of PCIe with 256 bytes have up to 28 of headers."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second.

    Attributes:
        out, back: between a device and where a sleeping process keeps its contents.
        within: of a copy within a device, which reads and writes every byte.
        between: from one device to another.
    """

    out: float
    back: float
    within: float
    between: float


H100 = Rates(_REACHED * 64e9, _REACHED * 64e9, _REACHED * 3.35e12 / 2, _REACHED * 450e9)
"""PCIe 5 with 16 lanes, HBM and NVLink (data sheet of the H100 SXM: 128, 3350 and 900 GB/s, of PCIe and NVLink in both directions)."""
CPUS = Rates(3.3e9, 3.5e9, 25.6e9 / 2, 25.6e9 / 2)
"""An SSD by its data sheet (Samsung 970 EVO Plus), as contents go to a file, and a channel of DDR4-3200."""


@dataclass(frozen=True)
class Move:
    """Bytes of the busiest device, and their least seconds."""

    nbytes: int
    seconds: float


def moves(kept: int, changed: int, backup: int, update: Forecast, rates: Rates) -> Mapping[str, Move]:
    """Return the moves of a switch, by name as above.

    Args:
        kept: bytes of a trainer rank that come back from host memory, or of all ranks that write to one disk.
        changed: bytes of these that go there.
        backup: as `kept`, of an engine rank's weights.
        update: the weight update, at `rates.between`.
    """
    arrive_s = max(update.within / rates.within, update.seconds)
    return {
        "trainer_in": Move(kept, kept / rates.back),
        "trainer_out": Move(changed, changed / rates.out),
        "engines_in": Move(backup + update.received, backup / rates.back + arrive_s),
    }


def of_run(config: Config, hf: Hf) -> Mapping[str, Move]:
    """Return the moves of a run whose devices are used in turn. Raises as `budget.of_run`."""
    cpu, parallel, engine = budget.for_cpu(config), models.trainer_parallel(config), models.engine_parallel(config)
    stages, sleeps = memory.trainer(hf, parallel, budget.training(config, hf, cpu)), frozenset(config.trainer.sleep)
    kept, changed = ([of(stage, sleeps) for stage in stages] for of in (phases.moved, phases.changed))
    serves, rates = budget.serving(config, hf, cpu, staged=False), CPUS if cpu else H100
    back = phases.backup(memory.engine(hf, engine, serves))
    first, count, nic = None if cpu else first_gpu(config, False), config.engines.count, rates.between / 1e9
    update = traffic.foresee(hf, parallel, engine, count, dtype=serves.dtype, adapter=serves.adapter, nic=nic, first=first)
    if cpu:
        each = parallel.tp * parallel.dp
        return moves(sum(kept) * each, sum(changed) * each, back * count * engine.world, update, rates)
    return moves(max(kept), max(changed), back, update, rates)


def bound(config: Config, hf: Hf) -> Mapping[str, float]:
    """Return the least seconds of a switch by part: `trainer_in`, `trainer_out`, `engines_in`. Raises as `budget.of_run`."""
    return {name: move.seconds for name, move in of_run(config, hf).items()}
