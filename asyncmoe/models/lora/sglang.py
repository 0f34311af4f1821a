"""Layout of an adapter's halves in an engine's adapter memory.

Source: sglang 0.5.23 (lora/mem_pool.py, lora/layers.py, lora/lora.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

from asyncmoe.models.lora.adapter import OUTER, STACKS, Kind, Place, places, served_targets, sizes
from asyncmoe.models.parallel import EngineParallel
from asyncmoe.models.shape import Shape
from asyncmoe.models.shards import shard, span
from asyncmoe.reshard.layout import PADDING, Box, LayoutBuilder, RankLayout, columns, rows, whole


def memory_layout(m: Shape, kind: Kind, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
    """Return the layout of one slot of an engine rank's adapter memory: `LoRAMemoryPool.A_buffer[module][layer][slot]` is the storage
    "layers.{layer}.{module}.a", and B_buffer's storage ends in ".b". The engine's --max-lora-rank is the adapter's rank.

    SGLang stores the experts' B multiplied by the adapter's scale; in all other layers it applies the scale as it computes. The writer of
    this memory must scale B of all layers, and have the slot's adapter loaded with alpha equal to its rank.

    Args:
        dtype: dtype of the engine.

    Raises:
        ConfigError: the sizes do not divide the model.
    """
    builder = LayoutBuilder(rank, dtype)
    layer = cache(partial(_memory_layer, _Slot(m, kind, parallel, rank), dtype))
    for dense, run in m.runs(range(m.layers)):
        builder.repeat(layer(dense), [(f"layers.{i}.", f"layers.{i}.") for i in run])
    return builder.build()


def _memory_layer(slot: _Slot, dtype: str, dense: bool) -> RankLayout:
    """Return the layout of one layer; halves and storages are named within the layer."""
    builder = LayoutBuilder(slot.rank, dtype)
    told = served_targets(slot.kind)
    for module, targets in STACKS.items():
        for place in places(slot.m, targets[0], dense) if targets[0] in told else ():
            for half in "ab":
                _put(builder, slot, module, dense, place, half)
    return builder.build()


def _put(builder: LayoutBuilder, slot: _Slot, module: str, dense: bool, place: Place, half: str) -> None:
    """Add one half, for all linear layers that an SGLang module stacks in a place."""
    targets, of_experts = STACKS[module], place == "experts"
    if not of_experts:
        here = [f"{place}." if place else ""]
    elif slot.kind.experts == "shared_outer" and OUTER[targets[0]] == half:
        here = ["experts.shared."]
    else:
        here = [f"experts.{e}." for e in slot.experts]
    boxes = [slot.box(target, half, dense, place) for target in targets]
    parts = []
    for at, front in enumerate(here):
        row = 0
        for target, box in zip(targets, boxes, strict=True):
            held = (f"{front}{target}.{half}", box) if target in slot.kind.targets else (PADDING, whole(box.extent))
            parts.append((*held, (at, row, 0) if of_experts else (row, 0)))
            row += box.extent[0]
    stacked = (sum(box.extent[0] for box in boxes), boxes[0].extent[1])
    name = f"{module}_moe.{half}" if of_experts else f"{module}.{half}"
    builder.place(name, (len(here), *stacked) if of_experts else stacked, parts)


@dataclass(frozen=True)
class _Slot:
    """An adapter's kind, and the engine rank it is sharded for."""

    m: Shape
    kind: Kind
    parallel: EngineParallel
    rank: int

    @property
    def experts(self) -> range:
        """The experts of the rank."""
        return span(self.m.experts, self.parallel.ep, self.parallel.ep_rank(self.rank))

    def box(self, target: str, half: str, dense: bool, place: Place) -> Box:
        """Return the rank's part of a half: the half on the sharded side of the layer's weight is sharded likewise, the other is whole."""
        outputs, inputs = sizes(self.m, target, dense, place)
        shape = (self.kind.rank, inputs) if half == "a" else (outputs, self.kind.rank)
        of_input = target in ("o_proj", "down_proj")
        if target in STACKS["fused_qkv_a_proj_with_mqa"] or of_input != (half == "a"):
            return whole(shape)
        return columns(shape, *self._divided(target, inputs, place)) if of_input else rows(shape, *self._divided(target, outputs, place))

    def _divided(self, target: str, total: int, place: Place) -> tuple[int, int]:
        """Return (first, count) of the rank's rows or columns."""
        m, parallel, rank = self.m, self.parallel, self.rank
        if place == "experts":
            return shard(total, parallel.moe_tp, parallel.moe_tp_rank(rank))
        if target in ("k_proj", "v_proj") and m.kv_heads < parallel.tp:
            # With fewer key heads than ranks, neighbours share one.
            return rank // (parallel.tp // m.kv_heads) * m.head_dim, m.head_dim
        return shard(total, parallel.tp, rank)
