"""Assignment of a machine's GPUs to the processes of a run: a pure function of the configuration and the number of GPUs.

A trainer rank takes the GPU of its LOCAL_RANK (`asyncmoe.trainer.model.mesh`). Engine i of a machine takes `engines.tp` GPUs, starting at
`first + i * tp` (SGLang's --base-gpu-id); an engine over several machines takes its share on each. GPUs are numbered as
CUDA_VISIBLE_DEVICES orders them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError

_DRIVER = Path("/dev/nvidiactl")


def none_here() -> bool:
    """True if processes of this machine see no NVIDIA device: there is none, or CUDA_VISIBLE_DEVICES hides all."""
    return not _DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")


@dataclass(frozen=True)
class Wanted:
    """The GPU processes of a run on one machine.

    Attributes:
        ranks: trainer ranks.
        engines: number of engines, or of parts of engines over several machines.
        tp: GPUs of each engine or part.
        first: the first GPU of engine 0.
        share: an engine and a trainer rank may use the same GPU (`Config.in_turn`).
        parted: `engines` counts parts of engines over several machines.
    """

    ranks: int
    engines: int
    tp: int
    first: int
    share: bool = False
    parted: bool = False

    @property
    def devices(self) -> Devices:
        """The GPUs taken, if the machine has enough."""
        engines = (range(self.first + index * self.tp, self.first + (index + 1) * self.tp) for index in range(self.engines))
        return Devices(tuple(range(self.ranks)), tuple(map(tuple, engines)))


@dataclass(frozen=True)
class Devices:
    """GPUs of one machine.

    Attributes:
        trainer: GPU of each trainer rank, by LOCAL_RANK.
        engines: GPUs of each engine, by tensor-parallel rank.
    """

    trainer: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]

    @property
    def shared(self) -> tuple[int, ...]:
        """GPUs used by a trainer rank and an engine."""
        return tuple(sorted(set(self.trainer) & {device for engine in self.engines for device in engine}))

    @property
    def taken(self) -> tuple[int, ...]:
        """GPUs used by any process."""
        return tuple(sorted({*self.trainer, *(device for engine in self.engines for device in engine)}))


def first_gpu(config: Config, several: bool) -> int:
    """The first GPU of a machine's engines.

    Args:
        several: the run has several machines, so engines and trainer ranks are on different ones.
    """
    engines = config.engines
    if engines.first_gpu is not None:
        return engines.first_gpu
    return 0 if several or config.in_turn else config.trainer.ranks


def wanted(config: Config, several: bool) -> tuple[Wanted, ...]:
    """The GPUs wanted on the run's machine; with `several`, on a trainer machine and on an engine machine."""
    trainer, engines, cluster = config.trainer, config.engines, config.cluster
    first = first_gpu(config, several)
    if not several:
        return (Wanted(trainer.ranks, engines.count, engines.tp, first, config.in_turn),)
    return (
        Wanted(-(-trainer.ranks // cluster.trainer_nodes), 0, engines.ranks_per_node, first),
        Wanted(0, -(-engines.count * engines.nodes // cluster.engine_nodes), engines.ranks_per_node, first, parted=engines.nodes > 1),
    )


def engine_gpu(config: Config, index: int, node: int, several: bool) -> int:
    """The first GPU of one node of an engine. If all nodes are on one machine, their GPUs are adjacent; otherwise each uses the `index`-th
    share of its machine's GPUs.

    Args:
        index: number of the engine, or of its part, on the machine.
    """
    per_node, first = config.engines.ranks_per_node, first_gpu(config, several)
    return first + index * per_node if several else first + index * config.engines.tp + node * per_node


def place(asked: Wanted, gpus: int, hidden: int = 0) -> Devices:
    """The GPUs of every process on a machine with `gpus` GPUs.

    Args:
        hidden: number of GPUs that CUDA_VISIBLE_DEVICES hides from the run, for messages.

    Raises:
        ConfigError: the machine has too few GPUs, or an engine and the trainer would use the same GPU, but not in turn.
    """
    limited = f" (CUDA_VISIBLE_DEVICES hides {hidden} more)" if hidden else ""
    more = "name more GPUs in CUDA_VISIBLE_DEVICES, or " if hidden else ""
    if asked.ranks > gpus:
        raise ConfigError(
            "trainer.ranks",
            got=f"{asked.ranks} on a machine with {counted(gpus)}{limited}",
            expected=f"at most {gpus}, as NCCL refuses two ranks on one GPU",
            hint=f"{more}lower trainer.ranks (and tp, pp, ep to match), or take a machine with more GPUs; examples/demo-gpu.yaml needs one",
        )
    devices = asked.devices
    if devices.shared and not asked.share:
        raise ConfigError(
            "engines.first_gpu",
            got=f"{asked.first}, which puts an engine and the trainer on {named(devices.shared)}",
            expected=f"at least {asked.ranks}, after the trainer's GPUs",
            hint="leave it out, or let trainer and engines use the same GPUs in turn with placement=colocated",
        )
    end = asked.first + asked.engines * asked.tp
    if asked.engines and end > gpus:
        each = "engines.tp / engines.nodes" if asked.parted else "engines.tp"
        in_turn = ", or use the trainer's GPUs in turn with placement=colocated" if asked.ranks and not asked.share else ""
        raise ConfigError(
            "GPUs of this machine",
            got=f"{gpus}{limited}",
            expected=f"at least {end}: from GPU {asked.first} on, {asked.engines} x {asked.tp} ({each})",
            hint=f"{more}take fewer or smaller engines{in_turn}",
        )
    return devices


def counted(number: int, what: str = "GPU") -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def named(devices: Sequence[object]) -> str:
    """Format as `GPU 0` or `GPUs 0, 1`."""
    return ("GPU " if len(devices) == 1 else "GPUs ") + ", ".join(map(str, devices))
