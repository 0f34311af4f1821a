"""Runs in a worker of SGLang: what its adapter memory holds, written to a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

LOADER = "tests.engine.adapter_probe.dump"
"""For --custom-weight-loader, and as the load_format of a call."""


def dump(model: torch.nn.Module, named: Sequence[tuple[str, object]]) -> None:
    """Write {"layers.{layer}.{module}.{half}": [slots, ...]} as rank{rank}.pt into the folder that is the first tensor's name."""
    found = {}
    for name, module in model.named_modules():
        layer = re.search(r"layers\.(\d+)\.", name)
        if hasattr(module, "gate_up_lora_a_weights"):
            for stack in ("gate_up", "down"):
                for half in "ab":
                    found[f"layers.{layer[1]}.{stack}_proj_moe.{half}"] = getattr(module, f"{stack}_lora_{half}_weights")
        elif hasattr(module, "A_buffer_qkv"):
            found |= {f"layers.{layer[1]}.qkv_proj.a": module.A_buffer_qkv, f"layers.{layer[1]}.qkv_proj.b": module.B_buffer_qkv}
        elif hasattr(module, "A_buffer"):
            found |= {f"layers.{layer[1]}.o_proj.a": module.A_buffer, f"layers.{layer[1]}.o_proj.b": module.B_buffer}
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save({name: value.clone() for name, value in found.items()}, Path(named[0][0]) / f"rank{rank}.pt")
