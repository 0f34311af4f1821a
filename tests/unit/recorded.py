"""Recorded layouts by SGLang's own loader: some are in the tests, more may be next to the project."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from reshard_ranks import Arrays

from asyncmoe.models import EngineParallel

SHIPPED = Path(__file__).parent / "data" / "sglang_layouts"
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "sglang_layouts"
_DEFAULT = ("tp1", "tp2", "tp4", "tp8", "tp4_ep4", "tp4_ep2")
CASES = {
    "qwen3_dense": ("tp1", "tp2", "tp4", "tp8"),
    "qwen3_dense_tied": ("tp1", "tp2", "tp4"),
    "check_qwen3_dense": ("tp2",),
    "qwen3_moe": _DEFAULT,
    "check_qwen3_moe": ("tp2",),
    "deepseek_v3": _DEFAULT,
    "check_deepseek_v3": ("tp2", "tp4_ep4"),
    "glm4_moe": _DEFAULT,
    "check_glm4_moe": ("tp2",),
    "mixtral": _DEFAULT,
    "check_mixtral": ("tp2", "tp4_ep4"),
}
"""Those beside the project, by model."""
QUANTISED = {"qwen3_moe_fp8": ("tp1", "tp2", "tp4", "tp4_ep4"), "deepseek_v3_fp8": ("tp1", "tp2", "tp4", "tp4_ep4")}
"""Of engines of float8 in blocks, beside the project."""


@dataclass(frozen=True)
class Recorded:
    """One model, one set of server arguments, all ranks."""

    hf: dict[str, Any]
    document: dict[str, Any]

    @property
    def engine(self) -> EngineParallel:
        arguments = self.document["server_args"]
        return EngineParallel(arguments["tp_size"], arguments.get("ep_size", 1))

    def parameters(self, rank: int) -> dict[str, dict[str, Any]]:
        """A rank's entries; a parameter that has two names under its first one, and none that a loader never writes."""
        every = self.document["ranks"][rank]["params"].items()
        return {n: e for n, e in every if e["kind"] == "param" and "alias_of" not in e and isinstance(e["boxes"], list)}

    def loaded(self, rank: int, on_disk: Arrays) -> Arrays:
        """A rank's parameters after SGLang has loaded a checkpoint of int32."""
        return {name: self._fill(entry, on_disk) for name, entry in self.parameters(rank).items()}

    def _fill(self, entry: dict[str, Any], on_disk: Arrays) -> np.ndarray:
        array = np.full(entry["shape"], -2, np.int32)
        for start, extent, tensor, *place in entry["boxes"]:
            view = array[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))]
            if tensor == "zero":
                view[...] = 0
            else:
                offset, strides = place
                flat = on_disk[self.document["hf_tensors"][tensor][0]].reshape(-1)
                view[...] = np.lib.stride_tricks.as_strided(flat[offset:], extent, [4 * s for s in strides])
        return array


def cases() -> list[tuple[str, str]]:
    """(model, case) of all that there is to compare with."""
    shipped = sorted((file.parent.name, file.name.removesuffix(".json.gz")) for file in SHIPPED.glob("layouts/*/*.json.gz"))
    return shipped + beside(CASES)


def beside(known: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """(model, case) of a table, if the project has these recordings next to it."""
    return [(model, case) for model, names in known.items() for case in names] if BESIDE.is_dir() else []


def read(model: str, case: str) -> Recorded:
    """One of `cases`, or of `QUANTISED`."""
    root = BESIDE if model in CASES or model in QUANTISED else SHIPPED
    file = root / "layouts" / model / f"{case}.json.gz"
    hf = json.loads((root / "configs" / model / "config.json").read_text())
    return Recorded(hf, json.loads(gzip.decompress(file.read_bytes())))
