"""Reads a dense checkpoint and writes the mixture that follows from it, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from asyncmoe.errors import ConfigError, DataError
from asyncmoe.models import load_hf_config
from asyncmoe.models.checkpoint import hf_name
from asyncmoe.models.families import family_of
from asyncmoe.models.hf_checkpoint import HFCheckpoint, copy_texts, file_name, write_index
from asyncmoe.models.shape import HfConfig, Shapes
from asyncmoe.models.upcycling.distil import Distillation, Distilled, distil
from asyncmoe.models.upcycling.fresh import Fresh
from asyncmoe.models.upcycling.inputs import check_places, check_tensors, check_width
from asyncmoe.models.upcycling.mixture import ROUTER_STD, Upcycling, settings, source
from asyncmoe.storage import new_directory, writing

_SHARD_BYTES = 4 << 30


def upcycle(
    dense: Path,
    out: Path,
    wanted: Upcycling,
    share: float = 0.0,
    how: Distillation | None = None,
    say: Callable[[str], None] = print,
    signals: Sequence[int] = (),
) -> Distilled | None:
    """Write the mixture, with the dense model's tokenizer. `out` is complete or does not exist.

    Args:
        share: part of each expert's neurons that start anew; 0: the experts are equal, and the mixture computes what the dense model does.
        how: how a mixture with new neurons learns from the dense model; None: it does not.
        say: is told of the progress.
        signals: see `new_directory`.

    Returns:
        What the distillation measured; None without one.

    Raises:
        DataError: the dense model is incomplete or not what its configuration says, or `out` exists or is inside it.
        ConfigError: see `settings`; experts are too narrow, or `how` asks for longer sequences than the model's.
        UserError: the distillation led nowhere.
        StorageError: the mixture could not be written.
    """
    check_places(dense, out)
    hf = load_hf_config(dense)
    values = settings(hf, wanted)
    checkpoint = HFCheckpoint(dense)
    check_tensors(dense, checkpoint, hf)
    copied = _Copied(dense, checkpoint, hf, values, Fresh(share, wanted.seed))
    width = family_of(values).shape_of(values).expert_width
    _check_share(share, width, wanted.experts)
    if how is not None and how.tokens > (most := int(hf["max_position_embeddings"])):
        raise ConfigError("--tokens", got=how.tokens, expected=f"at most max_position_embeddings = {most} of the dense model")
    if warning := check_width(width, wanted.shared + 1, copied.dtype.itemsize):
        say(warning)
    with new_directory("mixture", out, signals) as scratch:
        with writing("mixture", out):
            _write_weights(scratch, values, copied)
            (scratch / "config.json").write_text(json.dumps(values, indent=2) + "\n")
            copy_texts(dense, scratch)
        found = distil(dense, scratch, how, say) if how is not None else None
        with writing("mixture", out):
            for path in scratch.glob("*.safetensors"):
                path.chmod((scratch / "config.json").stat().st_mode)  # safetensors writes for its user alone
    return found


def _check_share(share: float, width: int, experts: int) -> None:
    if share and not round(share * width):
        raise ConfigError("--diversify", got=f"{share:g}, less than half a neuron of {width}", expected=f"at least {1 / width:.2g}")
    if share and experts == 1:
        raise ConfigError("--diversify", got=f"{share:g} with --experts 1", expected="at least 2 experts: one differs from none")


def shards_of(shapes: Shapes, itemsize: int, limit: int) -> list[list[str]]:
    """Split tensors into files of at most `limit` bytes, in order; a tensor that is larger has a file of its own."""
    files: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = prod(shape) * itemsize
        if files[-1] and held + size > limit:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


class _Copied:
    """The mixture's tensors, made one after the other."""

    def __init__(self, path: Path, checkpoint: HFCheckpoint, dense: HfConfig, values: HfConfig, fresh: Fresh) -> None:
        self._path, self._checkpoint, self._family = path, checkpoint, family_of(dense)
        self._dense, self._mixture = self._family.shape_of(dense), family_of(values).shape_of(values)
        self._fresh, self._shapes = fresh, self._family.tensors(dense)
        self._std = float(dense.get("initializer_range", ROUTER_STD))
        self._drawn = torch.Generator().manual_seed(fresh.seed)
        self.dtype = checkpoint.dtype(self._on_disk("embed"))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a canonical tensor. Routers are drawn in the order of the calls."""
        kept = torch.float32 if name.split(".", 2)[-1] in self._mixture.wide else self.dtype
        found = source(name, self._dense, self._mixture)
        if found.tensor is None:
            biased = name.endswith("router_bias")
            return torch.zeros(shape) if biased else (torch.randn(shape, generator=self._drawn) * self._std).to(kept)
        stored = self._on_disk(found.tensor)
        whole = self._checkpoint.read(stored, self._shapes[found.tensor], kept)
        if not bool(torch.isfinite(whole).all()):
            raise DataError(f"{self._path}: tensor {stored}", got="infinite values or no numbers", expected=f"finite ones, in {kept}")
        if not found.count:
            return whole.clone() if name == "head" else whole  # safetensors refuses tensors that share memory, as a tied head may
        part = whole.narrow(1 if name.endswith("down") else 0, found.first, found.count).clone()
        _, layer, *inner = name.split(".")
        return self._fresh.drawn(part, int(layer), int(inner[1]), inner[2]) if self._fresh.share and inner[0] == "experts" else part

    def _on_disk(self, tensor: str) -> str:
        return hf_name(self._dense, self._family.hf_names, tensor)


def _write_weights(folder: Path, values: HfConfig, copied: _Copied) -> None:
    family = family_of(values)
    m, shapes = family.shape_of(values), family.tensors(values)
    names = {name: hf_name(m, family.hf_names, name) for name in shapes}
    files = shards_of(shapes, copied.dtype.itemsize, _SHARD_BYTES)
    index: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        file = file_name(number, len(files))
        save_file({names[name]: copied.tensor(name, shapes[name]) for name in held}, folder / file, {"format": "pt"})
        index |= {names[name]: file for name in held}
    write_index(folder, sum(prod(shape) for shape in shapes.values()) * copied.dtype.itemsize, index)
