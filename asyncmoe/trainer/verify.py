"""What the engines should hold: the checksums SGLang's `/weights_checker` would report after loading given Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncmoe.config.generation import EngineSection
from asyncmoe.models import EngineParallel, engine_dtype, family_of
from asyncmoe.reshard import LocalTransport, exchange, plan
from asyncmoe.reshard.checksum import engine_checksums as checksums_of


def engine_checksums(hf: Mapping[str, Any], engines: EngineSection, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], ...]:
    """Expected checksums of each rank of an engine, by SGLang's parameter names.

    Args:
        tensors: the whole Hugging Face checkpoint, by name, on the CPU; cast to the engine's dtype as SGLang's loader casts.
    """
    dtype = engine_dtype(hf, engines)
    family = family_of(hf)
    source = family.hf_layout(hf, dtype)
    cast = {name: tensor.to(getattr(torch, source.storages[name].dtype)) for name, tensor in tensors.items()}
    found = []
    for rank in range(engines.tp):
        layout = family.sglang_layout(hf, EngineParallel(engines.tp, engines.ep), rank, dtype).at(0)
        held = {name: torch.empty(storage.shape, dtype=getattr(torch, storage.dtype)) for name, storage in layout.storages.items()}
        exchange(plan(family.tensors(hf), [source], [layout]), LocalTransport(), cast, held)
        found.append(checksums_of(held))
    return tuple(found)
