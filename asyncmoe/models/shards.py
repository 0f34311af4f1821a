"""Equal shards, and the storages that layouts are made of."""

from __future__ import annotations

from asyncmoe.errors import ConfigError
from asyncmoe.models.shape import Shape, Shapes
from asyncmoe.reshard.layout import PADDING, Box, LayoutBuilder, columns, rows, whole


def shard(total: int, parts: int, index: int) -> tuple[int, int]:
    """(first, count) of an equal shard.

    Raises:
        ConfigError: `parts` does not divide `total`.
    """
    if total % parts:
        raise ConfigError("equal shards", got=f"{total} over {parts} ranks", expected="a multiple")
    return index * (total // parts), total // parts


def span(total: int, parts: int, index: int) -> range:
    """The entries of an equal shard."""
    first, count = shard(total, parts, index)
    return range(first, first + count)


def dtype_of(m: Shape, tensor: str) -> str | None:
    """The dtype of a tensor, as named within a layer, where it is not that of the others."""
    return "float32" if tensor in m.wide else None


def put_whole(builder: LayoutBuilder, shapes: Shapes, storage: str, tensor: str, dtype: str | None = None) -> None:
    """A storage that is one whole tensor, of the layout's dtype unless another is named."""
    builder.stack(storage, [(tensor, whole(shapes[tensor]))], dtype)


def put_rows(builder: LayoutBuilder, shapes: Shapes, storage: str, tensor: str, parts: int, index: int) -> None:
    """A storage that is a row shard of a tensor."""
    shape = shapes[tensor]
    builder.stack(storage, [(tensor, rows(shape, *shard(shape[0], parts, index)))])


def put_columns(builder: LayoutBuilder, shapes: Shapes, storage: str, tensor: str, parts: int, index: int) -> None:
    """A storage that is a column shard of a tensor."""
    shape = shapes[tensor]
    builder.stack(storage, [(tensor, columns(shape, *shard(shape[-1], parts, index)))])


def put_gated_mlp(builder: LayoutBuilder, shapes: Shapes, tensor: str, gate_up: str, down: str, parts: int, index: int) -> None:
    """A shard of a gated MLP: its gate rows over its up rows in one storage, its columns of down in another.

    Args:
        tensor: what the names of the three tensors begin with.
    """
    gate = shapes[f"{tensor}gate"]
    part = rows(gate, *shard(gate[0], parts, index))
    builder.stack(gate_up, [(f"{tensor}gate", part), (f"{tensor}up", part)])
    put_columns(builder, shapes, down, f"{tensor}down", parts, index)


def put_padded_rows(builder: LayoutBuilder, shapes: Shapes, storage: str, tensor: str, multiple: int, parts: int, index: int) -> None:
    """A row shard of a tensor that is first padded to a multiple of rows; it may end in padding or be nothing else."""
    total, *rest = shapes[tensor]
    first, count = shard(padded(total, multiple), parts, index)
    real = max(0, min(count, total - first))
    held: list[tuple[str, Box]] = []
    if real:
        held.append((tensor, rows((total, *rest), first, real)))
    if real < count:
        held.append((PADDING, whole((count - real, *rest))))
    builder.stack(storage, held)


def padded(total: int, multiple: int) -> int:
    """The least multiple that is not below `total`."""
    return -(-total // multiple) * multiple
