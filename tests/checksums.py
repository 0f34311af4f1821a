"""The checksums SGLang's `/weights_checker` should report for an engine that has loaded a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncmoe.config.engines import EngineSection
from asyncmoe.models import EngineParallel, engine_dtype
from asyncmoe.models.payload import Payload
from asyncmoe.platform.float8 import dequantised
from asyncmoe.reshard import LocalTransport, exchange, plan
from asyncmoe.reshard.checksum import engine_checksums as checksums_of
from asyncmoe.reshard.float8 import SCALES


def engine_checksums(
    hf: Mapping[str, Any], engines: EngineSection, tensors: Mapping[str, torch.Tensor], device: str = "cpu"
) -> tuple[dict[str, str], ...]:
    """Return the expected checksums of each rank of an engine, by SGLang's parameter names.

    Args:
        tensors: the whole Hugging Face checkpoint, by name, on the CPU; cast to the engine's dtype as SGLang's loader casts. For a float8
            engine, already quantised and with scales.
        device: the device the engine reports; SGLang uses a different hash on a GPU.
    """
    dtype, payload = engine_dtype(hf, engines), Payload(hf)
    source = payload.whole(dtype)
    cast = {name: tensor.to(getattr(torch, source.storages[name].dtype)) for name, tensor in tensors.items()}
    found = []
    for layout in payload.engines(EngineParallel(engines.tp, engines.ep, engines.dp_attention), dtype):
        held = {name: torch.empty(storage.shape, dtype=getattr(torch, storage.dtype)) for name, storage in layout.storages.items()}
        exchange(plan(payload.tensors(), [source], [layout.at(0)]), LocalTransport(), cast, held)
        for name in [name for name in held if name + SCALES in held]:
            # SGLang hashes the dequantised values, in bfloat16 (utils/weight_checker_comparator.py, Fp8BlockComparable).
            held[name] = dequantised(held[name], held.pop(name + SCALES), torch.bfloat16)
        found.append(checksums_of(held, device))
    return tuple(found)
