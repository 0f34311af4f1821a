"""Adapters as engines take them: the server's arguments, files and messages.

An adapter's memory in the engines is either written by the receivers (`asyncmoe.receiver`): then there is one adapter, `NAME`, installed at
the start. Or every version is an adapter of its own, loaded by SGLang (`asyncmoe.rollout.engines.adapter_slots`).
"""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import numpy as np

from asyncmoe.config import Config
from asyncmoe.errors import UserError
from asyncmoe.models.lora import peft
from asyncmoe.models.lora.adapter import DTYPES, Adapter, Kind, check_rank, served, served_config, served_shapes, served_targets
from asyncmoe.models.shape import Shape
from asyncmoe.rollout.engines.engine_client import AdapterMessage, EngineClient, Sampling

NAME = "policy"
"""The adapter of an engine whose adapter memory is written."""
SLOTS = 2
BASE = "0"
"""What an engine calls the checkpoint's weights (`engine.command`)."""
_IN_MEMORY = Path("/dev/shm")
_LIMIT = "--max-lora-rank"


def in_memory(config: Config) -> bool:
    """Adapters are trained, and the receivers write them."""
    return config.adapter is not None and config.sync.method == "reshard"


class AdapterChoice(TypedDict):
    """Of `asyncmoe.rollout.engines.pool.Pool`."""

    adapter: str | None
    slots: bool


def asked(config: Config) -> AdapterChoice:
    """What requests name."""
    return {"adapter": NAME if in_memory(config) else None, "slots": config.adapter is not None and not in_memory(config)}


def flags(kind: Kind, limit: int | None = None) -> list[str]:
    """Arguments of a server that is to serve adapters of a kind, without those of a device.

    Args:
        limit: the highest rank it has room for; None: that of `kind`.

    Raises:
        UserError: the rank is above the limit.
    """
    limit = kind.rank if limit is None else limit
    check_rank(kind, limit)
    sharing = "" if kind.experts == "shared_outer" else "no-"
    return [
        "--enable-lora",
        *(_LIMIT, str(limit)),
        *("--lora-target-modules", *served_targets(kind)),
        # Requests without an adapter take up one of these too.
        *("--max-loras-per-batch", str(SLOTS)),
        # By default SGLang looks at adapters given at the start, and there are none.
        f"--{sharing}experts-shared-outer-loras",
        "--lora-strict-loading",
    ]


def limit_in(arguments: Sequence[str]) -> int | None:
    """The highest rank that a user's own arguments of the server leave room for, if they say.

    Raises:
        UserError: no number.
    """
    for at, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == _LIMIT:
            text = value or "".join(arguments[at + 1 : at + 2])
            if not text.isdecimal():
                raise UserError(f"engines.args: {_LIMIT}", got=repr(text), expected="a number")
            return int(text)
    return None


async def install(client: EngineClient, m: Shape, kind: Kind, dtype: str, timeout_s: float) -> None:
    """Give an engine the adapter `NAME`, which changes nothing yet, where the receivers will write its values.

    It is pinned, and sampled with once: from then on SGLang never fills its slot again. Its scale is 1, as the values that are written
    have theirs in them.

    Raises:
        EngineError, WaitTimeout: the engine refused or did not answer.
    """
    with TemporaryDirectory(prefix="asyncmoe-adapter-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as folder:
        blank(Path(folder), m, replace(kind, alpha=float(kind.rank)), dtype)
        await client.load_adapter(NAME, Path(folder), timeout_s, pinned=True)
    await client.generate((0,), Sampling(1.0, 1, ()), NAME, timeout_s, adapter=NAME)


def blank(folder: Path, m: Shape, kind: Kind, dtype: str) -> Path:
    """As `peft.write_served`, of an adapter of zeros, whose file takes no room however large it is."""
    peft.write_blank(folder, served_config(kind), dtype, served_shapes(m, kind))
    return folder


def message(m: Shape, adapter: Adapter, ranks: int) -> AdapterMessage:
    """An adapter as engines anywhere take it.

    Args:
        ranks: tensor-parallel ranks of the engine, each of which is sent all of it.

    Raises:
        UserError: see `Adapter.check`.
    """
    return AdapterMessage(served_config(adapter.kind), (payload(served(m, adapter), adapter.dtype),) * ranks)


def payload(tensors: Mapping[str, np.ndarray], dtype: str) -> str:
    """Tensors as one rank of an engine takes them: torch's pickle of {name: tensor}, in base64.

    All are views of one storage, so the engine reads one block of bytes and not one for each tensor, as with tensors of their own.

    Args:
        tensors: `asyncmoe.models.lora.adapter.served`.
        dtype: theirs, of `adapters.DTYPES`.
    """
    import torch

    flat = torch.from_numpy(np.concatenate([np.ascontiguousarray(value, DTYPES[dtype]).ravel() for value in tensors.values()]))
    typed: Any = torch.storage.TypedStorage
    storage = typed(wrap_storage=flat.untyped_storage(), dtype=getattr(torch, dtype), _internal=True)
    parts, offset = {}, 0
    for name, value in tensors.items():
        strides = tuple(int(np.prod(value.shape[axis + 1 :])) for axis in range(value.ndim))
        parts[name] = _Part((storage, offset, value.shape, strides, False, OrderedDict()))
        offset += value.size
    written = io.BytesIO()
    _Pickler(written, protocol=4).dump(parts)
    return base64.b64encode(written.getbuffer()).decode()


@dataclass(frozen=True)
class _Part:
    """A tensor, as the arguments of `torch._utils._rebuild_tensor_v2`."""

    arguments: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    """Writes a `_Part` as the tensor it stands for."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Part):
            return NotImplemented
        from torch._utils import _rebuild_tensor_v2

        return _rebuild_tensor_v2, value.arguments
