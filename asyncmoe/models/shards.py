"""Equal shards, and the storages that make up layouts."""

from __future__ import annotations

from asyncmoe.errors import ConfigError
from asyncmoe.models.shape import Shape, Shapes
from asyncmoe.reshard.layout import LayoutBuilder, columns, rows, whole


def shard(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return (first, count) of an equal shard.

    Raises:
        ConfigError: `parts` does not divide `total`.
    """
    if total % parts:
        raise ConfigError("equal shards", got=f"{total} over {parts} ranks", expected=f"a multiple of {parts}")
    return index * (total // parts), total // parts


def span(total: int, parts: int, index: int) -> range:
    """Return the entries of an equal shard."""
    first, count = shard(total, parts, index)
    return range(first, first + count)


def dtype_of(m: Shape, tensor: str) -> str | None:
    """Return the dtype of a tensor, by name within a layer, if it differs from the layout's dtype; else None."""
    return "float32" if tensor in m.wide else None


def put_whole(builder: LayoutBuilder, shapes: Shapes, storage: str, tensor: str, dtype: str | None = None) -> None:
    """Add a storage with one whole tensor, in the layout's dtype unless `dtype` is given."""
    builder.stack(storage, [(tensor, whole(shapes[tensor]))], dtype)


def put_rows(builder: LayoutBuilder, shapes: Shapes, storage: str, tensor: str, parts: int, index: int) -> None:
    """Add a storage with a row shard of a tensor."""
    shape = shapes[tensor]
    builder.stack(storage, [(tensor, rows(shape, *shard(shape[0], parts, index)))])


def put_columns(builder: LayoutBuilder, shapes: Shapes, storage: str, tensor: str, parts: int, index: int) -> None:
    """Add a storage with a column shard of a tensor."""
    shape = shapes[tensor]
    builder.stack(storage, [(tensor, columns(shape, *shard(shape[-1], parts, index)))])


def put_gated_mlp(builder: LayoutBuilder, shapes: Shapes, tensor: str, gate_up: str, down: str, parts: int, index: int) -> None:
    """Add a shard of a gated MLP: gate rows above up rows in one storage, columns of down in another.

    Args:
        tensor: prefix of the names of the three tensors.
    """
    gate = shapes[f"{tensor}gate"]
    part = rows(gate, *shard(gate[0], parts, index))
    builder.stack(gate_up, [(f"{tensor}gate", part), (f"{tensor}up", part)])
    put_columns(builder, shapes, down, f"{tensor}down", parts, index)


def padded(total: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `total`."""
    return -(-total // multiple) * multiple
