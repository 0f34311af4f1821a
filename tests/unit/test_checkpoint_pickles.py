"""Globals that a checkpoint's `.metadata` may name. tests/apart/test_pickles.py checks that loading a checkpoint runs no code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from asyncmoe.platform.megatron import reader


def real(path: str = "__0_0.distcp") -> metadata.Metadata:
    """What torch writes for one tensor and one object."""
    chunk = metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.bfloat16), torch.Size([2, 3]), [chunk])
    places = {metadata.MetadataIndex("weight", [0, 0]): filesystem._StorageInfo(path, 0, 99)}
    return metadata.Metadata(
        {"weight": tensor, "state": metadata.BytesStorageMetadata()}, None, places, metadata.StorageMeta("run", "1"), "1.0.0"
    )


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(real(), protocol))
        assert reader.metadata(tmp_path / ".metadata") == real()


def _named(module: str, name: str) -> bytes:
    """Build a protocol-4 pickle that calls the named global, dotted names included."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93\x8c\x04true\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("torch", "Size.__class__"),
        ("builtins", "getattr"),
    ],
)
def test_ways_round_the_list_are_closed(tmp_path: Path, module: str, name: str) -> None:
    (tmp_path / "file").write_bytes(_named(module, name))
    with pytest.raises(reader.Unreadable, match="names"):
        reader.metadata(tmp_path / "file")


@pytest.mark.parametrize("path", ["../../other/__0_0.distcp", "/etc/shadow", "..", "", "a/b", 7])
def test_metadata_names_no_file_elsewhere(tmp_path: Path, path: Any) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(real(path)))
    with pytest.raises(reader.Unreadable, match="names the file"):
        reader.metadata(tmp_path / "file")


@pytest.mark.parametrize("payload", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(metadata.Metadata({}, None, None))])
def test_damaged_metadata_is_refused(tmp_path: Path, payload: bytes) -> None:
    (tmp_path / "file").write_bytes(payload)
    with pytest.raises(reader.Unreadable):
        reader.metadata(tmp_path / "file")


def test_metadata_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(reader.Unreadable, match=r"^no other$"):
        reader.metadata(tmp_path / "other")
