"""Layouts of the canonical halves on the trainer's ranks and in the whole adapter."""

from __future__ import annotations

from asyncmoe.models.lora.adapter import Kind, halves
from asyncmoe.models.lora.halves import PREFIX, Half, layer_halves
from asyncmoe.models.megatron import chunk_prefix
from asyncmoe.models.parallel import MegatronParallel
from asyncmoe.models.shape import Shape
from asyncmoe.reshard.layout import Box, LayoutBuilder, RankLayout, whole


def canonical_layout(m: Shape, kind: Kind, dtype: str) -> RankLayout:
    """Return the layout of the whole adapter on rank 0: a storage for each half, under its name."""
    builder = LayoutBuilder(0, dtype)
    for name, shape in halves(m, kind).items():
        builder.stack(name, [(name, whole(shape))])
    return builder.build()


def rank_layout(m: Shape, kind: Kind, parallel: MegatronParallel, rank: int, dtype: str) -> RankLayout:
    """Return the layout of a trainer rank's parameters, by the names of `asyncmoe.trainer.lora.attach.parameters`.

    Raises:
        ConfigError: the parallel sizes do not divide the model.
    """
    builder = LayoutBuilder(rank, dtype)
    layer: dict[bool, RankLayout] = {}
    for chunk, layers in enumerate(parallel.chunk_layers(m.layers, rank)):
        front = chunk_prefix(chunk, parallel.vpp) + PREFIX
        for dense, run in m.runs(layers):
            if dense not in layer:
                layer[dense] = _layer(layer_halves(m, kind, parallel, rank, dense), rank, dtype)
            builder.repeat(layer[dense], [(f"layers.{i}.", f"{front}{i - layers.start}.") for i in run])
    return builder.build()


def rank_layouts(m: Shape, kind: Kind, parallel: MegatronParallel, dtype: str) -> list[RankLayout]:
    """Return the layouts of all trainer ranks from 0."""
    return parallel.layouts(lambda rank: rank_layout(m, kind, parallel, rank, dtype))


def _layer(held: tuple[Half, ...], rank: int, dtype: str) -> RankLayout:
    builder = LayoutBuilder(rank, dtype)
    for half in held:
        rows, columns = half.box
        box = Box((rows.start, columns.start), half.part)
        corner = (0, 0)
        parts = [(name, box, corner if half.experts is None else (at, *corner)) for at, name in enumerate(half.canonical)]
        builder.place(f"{half.linear}.{half.name}", half.shape, parts)
    return builder.build()
