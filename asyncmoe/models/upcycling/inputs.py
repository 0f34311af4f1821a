"""What is asked of the dense model's files and of the place to write before anything is written."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncmoe.errors import ConfigError, DataError
from asyncmoe.models.checkpoint import hf_name
from asyncmoe.models.checks import CPU_WIDTH_MULTIPLE
from asyncmoe.models.families import family_of
from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.models.shape import HfConfig

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES = 16
_UNUSED = "rotary_emb.inv_freq"
"""Ending of tensors that old versions of transformers saved, and that follow from the configuration."""


def check_places(dense: Path, out: Path) -> None:
    """Refuse a `dense` that is no model's directory, and an `out` inside it.

    Raises:
        DataError
    """
    if not (dense / "config.json").is_file():
        got = "a file" if dense.is_file() else "no config.json" if dense.is_dir() else "no such directory"
        raise DataError(str(dense), got=got, expected="the directory of a dense model, with config.json and safetensors")
    if dense.resolve() in out.resolve().parents:
        raise DataError(str(out), got=f"a path inside {dense}", expected="one outside of the dense model")


def check_tensors(path: Path, checkpoint: HFCheckpoint, hf: HfConfig) -> None:
    """Refuse a checkpoint that has not exactly the tensors of its configuration, in float32, bfloat16 or float16.

    Raises:
        DataError: names a tensor.
    """
    family = family_of(hf)
    m = family.shape_of(hf)
    wanted = {hf_name(m, family.hf_names, name) for name in family.tensors(hf)}
    allowed = wanted | ({hf_name(m, family.hf_names, "head")} if m.tied else set())
    stored = {name for name in checkpoint.names() if not name.endswith(_UNUSED)}
    hint = "config.json is not this checkpoint's, or a file is missing"
    if unknown := sorted(stored - allowed):
        expected = f"none but those of config.json: {m.layers} layers of {family.name}"
        raise DataError(f"{path}: tensor {unknown[0]}", got="a tensor", expected=expected, hint=hint)
    if missing := sorted(wanted - stored):
        raise DataError(f"{path}: tensor {missing[0]}", got="nothing", expected="a tensor, as config.json has it", hint=hint)
    for name in sorted(wanted):
        if (dtype := checkpoint.dtype(name)) not in _FLOATS:
            got, expected = str(dtype).removeprefix("torch."), "float32, bfloat16 or float16"
            raise DataError(f"{path}: tensor {name}", got=got, expected=expected, hint="take the checkpoint that is not quantised")


def check_width(width: int, parts: int, itemsize: int) -> str | None:
    """Return a warning if experts are too narrow for engines on CPUs, else None.

    Args:
        width: of an expert.
        parts: into which the dense MLP is cut.
        itemsize: of an element, in bytes.

    Raises:
        ConfigError: rows of an expert are no multiple of 16 bytes, which transformers' grouped product needs.
    """
    if width % (_STRIDE_BYTES // itemsize):
        expected = f"a multiple of {_STRIDE_BYTES // itemsize}, rows of {_STRIDE_BYTES} bytes, which kernels for experts need"
        hint = "choose another --shared" if parts > 1 else "choose another dense model"
        raise ConfigError("the width of an expert", got=width, expected=expected, hint=hint)
    if width % CPU_WIDTH_MULTIPLE:
        return f"warning: experts of width {width} run on GPUs only: SGLang on a CPU wants a multiple of {CPU_WIDTH_MULTIPLE}"
    return None
