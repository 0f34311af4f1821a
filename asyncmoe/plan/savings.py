"""The cheapest settings with which a trainer's GPUs have room, parallel sizes as they are. Pure.

In the order of what they cost: parts of layers that are cheap to compute again, Adam's averages in bfloat16, whole experts again, whole
layers again, then the optimizer's state in host memory, as little of it as does. None of these costs has been measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.models.latent import Latent
from asyncmoe.models.shape import Shape
from asyncmoe.plan import host, memory
from asyncmoe.plan.memory import GpuMemory, Training

_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Savings:
    """Settings that save memory, and what a rank of the largest pipeline stage holds with them.

    Attributes:
        modules: `trainer.recompute_modules`, with `trainer.recompute` selective; () for none.
        full: `trainer.recompute` is full.
        bfloat16: both of Adam's averages are in bfloat16.
        offload: `trainer.memory.optimizer_offload`.
        host_bytes: pinned host memory of a rank for what is offloaded, see `asyncmoe.plan.host.optimizer_state`.
    """

    memory: GpuMemory
    modules: tuple[str, ...] = ()
    full: bool = False
    bfloat16: bool = False
    offload: float = 0.0
    host_bytes: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The settings as configuration keys, without those at their default."""
        selective = ("trainer.recompute=selective", f"trainer.recompute_modules=[{','.join(self.modules)}]") if self.modules else ()
        averages = ("trainer.memory.exp_avg_dtype=bfloat16", "trainer.memory.exp_avg_sq_dtype=bfloat16") if self.bfloat16 else ()
        full = ("trainer.recompute=full",) if self.full else ()
        offload = (f"trainer.memory.optimizer_offload={self.offload:g}",) if self.offload else ()
        return (*selective, *full, *averages, *offload)


def cheapest(hf: Mapping[str, Any], parallel: MegatronParallel, training: Training, gpu_gb: float, beside: int = 0) -> Savings | None:
    """Return the first settings that fit, None if none does; those of `training` are not counted.

    Args:
        beside: bytes of an engine on the same GPU.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    for modules, full, bfloat16, offload in _in_order(family_of(hf).shape_of(hf)):
        microbatch = replace(training.microbatch, recompute=full, modules=modules)
        tried = replace(training, microbatch=microbatch, averages=(2, 2) if bfloat16 else (4, 4), offload=offload)
        if (bfloat16 or offload) and (not training.distributed or microbatch.dtype == "float32"):
            continue
        most = max(memory.trainer(hf, parallel, tried), key=lambda stage: stage.total)
        if most.total + beside <= memory.usable(gpu_gb):
            return Savings(most, modules, full, bfloat16, offload, host.optimizer_state(hf, parallel, tried))
    return None


def _in_order(m: Shape) -> Iterator[tuple[tuple[str, ...], bool, bool, float]]:
    """Yield settings, the cheapest first: recomputed parts, whole layers, averages in bfloat16, the share that is offloaded."""
    light = ("layernorm", *(("moe_act",) if m.experts else ()), *(("mla_up_proj",) if isinstance(m.attention, Latent) else ()))
    heavy = ("layernorm", *(("moe",) if m.experts else ()), *(("mlp",) if m.dense_layers else ()))
    for modules, full in (((), False), (light, False), (heavy, False), ((), True)):
        yield from ((modules, full, bfloat16, 0.0) for bfloat16 in (False, True))
    for share in _SHARES:
        yield from ((modules, full, False, share) for modules, full in ((light, False), (heavy, False), ((), True)))
