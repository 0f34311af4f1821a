"""Where an adapter's halves lie on the engines' side: in the tensors SGLang is given, and in its adapter memory.

Source: sglang 0.5.23 (lora/mem_pool.py, lora/layers.py, lora/lora.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncmoe.config.lora import ATTENTION, MLP
from asyncmoe.models.lora.adapter import OUTER, Kind, pairs, served_name, served_shapes, served_targets
from asyncmoe.models.parallel import EngineParallel
from asyncmoe.models.shape import Shape
from asyncmoe.models.shards import shard, span
from asyncmoe.reshard.layout import PADDING, Box, LayoutBuilder, RankLayout, columns, rows, whole

_STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""SGLang's modules and the layers they stack."""


def served_layout(m: Shape, kind: Kind, dtype: str) -> RankLayout:
    """The tensors of `adapters.served`, as rank 0."""
    builder = LayoutBuilder(0, dtype)
    layer: dict[bool, RankLayout] = {}
    for dense, run in m.runs(range(m.layers)):
        if dense not in layer:
            layer[dense] = _served_layer(m, kind, dense, dtype)
        builder.repeat(layer[dense], [(f"layers.{i}.", served_name(i, "")) for i in run])
    return builder.build()


def memory_layout(m: Shape, kind: Kind, parallel: EngineParallel, rank: int, dtype: str) -> RankLayout:
    """What one slot of an engine rank's adapter memory holds: `LoRAMemoryPool.A_buffer[module][layer][slot]` is the storage
    "layers.{layer}.{module}.a", and B_buffer's the one that ends in ".b". The engine's --max-lora-rank is the adapter's rank.

    B of experts is there multiplied by the adapter's scale, that of all other layers is not: SGLang scales those as it computes.
    Whoever writes here scales B of all layers, and has the slot's adapter loaded with alpha equal to its rank.

    Args:
        dtype: the engine's.

    Raises:
        ConfigError: sizes that do not divide the model.
    """
    builder = LayoutBuilder(rank, dtype)
    layer: dict[bool, RankLayout] = {}
    for dense, run in m.runs(parallel.layers(m.layers, rank)):
        if dense not in layer:
            layer[dense] = _memory_layer(_Slot(m, kind, parallel, rank), dense, dtype)
        builder.repeat(layer[dense], [(f"layers.{i}.", f"layers.{i}.") for i in run])
    return builder.build()


def _served_layer(m: Shape, kind: Kind, dense: bool, dtype: str) -> RankLayout:
    """One layer; halves and tensors are named within it."""
    one = replace(m, layers=1, dense_layers=frozenset({0} if dense else ()))
    parts: dict[str, dict[str, tuple[str, Box, tuple[int, ...]]]] = {}
    for pair in pairs(one, kind):
        for half, name, shape in (("a", pair.a, (kind.rank, pair.inputs)), ("b", pair.b, (pair.outputs, kind.rank))):
            shared = kind.experts == "shared_outer" and OUTER.get(pair.target) == half
            stack = () if pair.expert is None else (0 if shared else pair.expert,)
            held = parts.setdefault(served_name(0, pair.target, half, pair.expert is not None), {})
            held[name] = (name.removeprefix("layers.0."), whole(shape), (*stack, 0, 0))
    builder = LayoutBuilder(0, dtype)
    for name, size in served_shapes(one, kind).items():
        nothing = {PADDING: (PADDING, whole(size), (0,) * len(size))}
        builder.place(name.removeprefix(served_name(0, "")), size, parts.get(name, nothing).values())
    return builder.build()


def _memory_layer(slot: _Slot, dense: bool, dtype: str) -> RankLayout:
    """One layer; halves and storages are named within it."""
    builder = LayoutBuilder(slot.rank, dtype)
    told = served_targets(slot.kind)
    for module, targets in _STACKS.items():
        if targets[0] not in told:
            continue
        of_experts = targets[0] in MLP and not dense
        for half in "ab":
            shared = of_experts and slot.kind.experts == "shared_outer" and OUTER[targets[0]] == half
            here = ["experts.shared."] if shared else [f"experts.{e}." for e in slot.experts] if of_experts else [""]
            boxes = [slot.box(target, half, of_experts) for target in targets]
            parts = []
            for at, front in enumerate(here):
                row = 0
                for target, box in zip(targets, boxes, strict=True):
                    held = (f"{front}{target}.{half}", box) if target in slot.kind.targets else (PADDING, whole(box.extent))
                    parts.append((*held, (at, row, 0) if of_experts else (row, 0)))
                    row += box.extent[0]
            stacked = (sum(box.extent[0] for box in boxes), boxes[0].extent[1])
            builder.place(f"{module}{'_moe' if of_experts else ''}.{half}", (len(here), *stacked) if of_experts else stacked, parts)
    return builder.build()


@dataclass(frozen=True)
class _Slot:
    """An adapter's kind and the rank of an engine it is cut for."""

    m: Shape
    kind: Kind
    parallel: EngineParallel
    rank: int

    @property
    def experts(self) -> range:
        """Those of the rank."""
        return span(self.m.experts, self.parallel.ep, self.parallel.ep_rank(self.rank))

    def box(self, target: str, half: str, of_experts: bool) -> Box:
        """The rank's part of a half: the side of a layer that is divided over the ranks is that of its weight, the other one is whole."""
        total, first, count = self._divided(target, of_experts)
        r, of_input = self.kind.rank, target in ("o_proj", "down_proj")
        if half == "a":
            return columns((r, total), first, count) if of_input else whole((r, self.m.hidden))
        return whole((self.m.hidden, r)) if of_input else rows((total, r), first, count)

    def _divided(self, target: str, of_experts: bool) -> tuple[int, int, int]:
        """(all, first, count) of the rows or columns that are divided over the ranks."""
        m, parallel, rank = self.m, self.parallel, self.rank
        if of_experts:
            return (m.expert_width, *shard(m.expert_width, parallel.moe_tp, parallel.moe_tp_rank(rank)))
        if target not in ATTENTION:
            return (m.dense_width, *shard(m.dense_width, parallel.tp, parallel.tp_rank(rank)))
        tp, at = parallel.attention_tp, parallel.attention_tp_rank(rank)
        if target in ("k_proj", "v_proj"):
            # With fewer key heads than ranks, neighbours share one.
            first, count = shard(m.kv_heads, tp, at) if m.kv_heads >= tp else (at // (tp // m.kv_heads), 1)
            return m.kv_heads * m.head_dim, first * m.head_dim, count * m.head_dim
        return (m.heads * m.head_dim, *shard(m.heads * m.head_dim, tp, at))
