"""Adapters in the forms that SGLang accepts: server arguments and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncmoe.engines.adapters import NAME, SLOTS
from asyncmoe.engines.sglang.client import SGLangClient
from asyncmoe.engines.types import Sampling
from asyncmoe.models.lora import peft
from asyncmoe.models.lora.adapter import Kind, served_config, served_targets

LIMIT = "--max-lora-rank"


def flags(kind: Kind, limit: int | None) -> list[str]:
    """Return the server arguments for adapters of a kind, without device-specific arguments.

    Args:
        limit: highest rank the server reserves memory for; None: the rank of `kind`.
    """
    sharing = "" if kind.experts == "shared_outer" else "no-"
    return [
        "--enable-lora",
        *(LIMIT, str(limit or kind.rank)),
        *("--lora-target-modules", *served_targets(kind)),
        *("--max-loras-per-batch", str(SLOTS)),
        # By default SGLang infers this from the adapters given at the start, and there are none.
        f"--{sharing}experts-shared-outer-loras",
        "--lora-strict-loading",
    ]


async def install(client: SGLangClient, kind: Kind, timeout_s: float) -> None:
    """Load the adapter `NAME` into an engine, as memory for the receivers to write; until they do, it changes nothing.

    It is pinned and used once: from then on SGLang never reuses its slot. Its scale is 1, because the receivers write values that include
    the scale. It has no tensors: SGLang 0.5.23 fills the memory of those that an adapter lacks with zeros
    (`LoRAMemoryPool.load_lora_weight_to_buffer`).

    Raises:
        EngineError, WaitTimeout: the engine refused or did not answer.
    """
    config = served_config(replace(kind, alpha=float(kind.rank)))
    with TemporaryDirectory(prefix="asyncmoe-adapter-") as folder:
        peft.write(Path(folder), peft.Files(config, "float32", {}))
        await client.load_adapter(NAME, Path(folder), timeout_s)
    await client.generate((0,), Sampling(1.0, 1, ()), NAME, timeout_s, adapter=NAME)
