"""The endpoints that pause a server and change its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from asyncmoe.engines.sglang.connection import SGLangConnection
from asyncmoe.engines.types import MemoryTag
from asyncmoe.platform.sglang.receiver_command import LOADER, Command, payload
from asyncmoe.rpc.messages import WeightsBucket, WeightsJoin

_STEP_S = 1.0
"""Bounds a forward pass."""


class _Place(msgspec.Struct, frozen=True):
    tp_rank: int


class _CheckedRank(msgspec.Struct, frozen=True):
    checksums: dict[str, str]
    parallelism_info: tuple[_Place]


class _Checked(msgspec.Struct, frozen=True):
    ranks: list[_CheckedRank]


class _Model(msgspec.Struct, frozen=True):
    """The part of `/model_info` used here."""

    weight_version: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}$")]


class WeightEndpoints(SGLangConnection):
    """The weight updates of an `Engine`, which documents the calls."""

    async def pause(self, retract: bool = False) -> None:
        """SGLang pauses between two forward passes; running requests stay, and keep their keys and values unless `retract`."""
        await self._send("/pause_generation", {"mode": "retract" if retract else "in_place"})

    async def flush(self) -> None:
        """SGLang refuses while requests run."""
        await self._send("/flush_cache?timeout=0", {})

    async def resume(self) -> None:
        await self._send("/continue_generation", {"torch_empty_cache": False})

    async def begin_update(self) -> None:
        """SGLang accepts no weights outside an update."""
        await self._send("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> None:
        await self._send("/end_weight_update", {})

    async def join_group(self, join: WeightsJoin, rank_offset: int, world: int, timeout_s: float) -> None:
        body = {
            "master_address": join.host,
            "master_port": join.port,
            "rank_offset": rank_offset,
            "world_size": world,
            "group_name": join.group,
            "backend": join.backend,
        }
        await self._send("/init_weights_update_group", body, timeout_s)

    async def load_bucket(self, bucket: WeightsBucket, group: str, timeout_s: float) -> None:
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            # Paused requests keep their keys and values. Cached prefixes need no flush, because their salt names the version.
            "flush_cache": False,
        }
        await self._send("/update_weights_from_distributed", body, timeout_s)

    async def load_files(self, folder: str, timeout_s: float) -> None:
        # Paused requests keep their keys and values, as in `load_bucket`.
        await self._send("/update_weights_from_disk", {"model_path": folder, "flush_cache": False}, timeout_s)

    async def command_receivers(self, commands: Sequence[Command], timeout_s: float, version: int | None = None) -> None:
        """SGLang passes the commands to `asyncmoe.weights.receiver.load`, as tensors in our own format, also while it generates
        (`asyncmoe.platform.sglang.commands`)."""
        body = {
            "serialized_named_tensors": [payload(command) for command in commands],
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": None if version is None else str(version),
        }
        await self._send("/update_weights_from_tensor", body, timeout_s)

    async def release_memory(self, tags: Sequence[MemoryTag], timeout_s: float) -> None:
        """If SGLang runs requests, it refuses a flush, but a release would end it. Requests last a step longer than their answers."""
        await self._send(f"/flush_cache?timeout={_STEP_S}", {}, timeout_s)
        await self._send("/release_memory_occupation", {"tags": tags}, timeout_s)

    async def resume_memory(self, tags: Sequence[MemoryTag], timeout_s: float) -> None:
        await self._send("/resume_memory_occupation", {"tags": tags}, timeout_s)

    async def poisoned(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        return await self._check("poisoned", timeout_s)

    async def weights_version(self) -> int:
        return int((await self._post("/model_info", None, _Model)).weight_version)

    async def set_version(self, version: int) -> None:
        await self._send("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def checksums(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        return await self._check("checksum", timeout_s)

    async def _check(self, action: str, timeout_s: float) -> tuple[dict[str, str], ...]:
        checked = await self._post("/weights_checker", {"action": action}, _Checked, timeout_s)
        ranks = {rank.parallelism_info[0].tp_rank: rank.checksums for rank in checked.ranks}  # every group reports all ranks
        # SGLang's layers with adapters contain the plain layer as `base_layer`.
        return tuple({name.replace(".base_layer.", "."): one for name, one in ranks[at].items()} for at in sorted(ranks))
