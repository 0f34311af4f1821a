"""Files of checkpoints that would run a command when they are unpickled: none is run, and what the file names is said."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncmoe.platform.megatron import reader


class Hostile:
    """Pickles as a call."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self._call = call, arguments

    def __reduce__(self) -> Any:
        return self._call


def real(path: str = "__0_0.distcp") -> Metadata:
    """What torch writes for one tensor and one object."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2, 3]), [chunk])
    places = {MetadataIndex("weight", [0, 0]): filesystem._StorageInfo(path, 0, 99)}
    return Metadata({"weight": tensor, "state": BytesStorageMetadata()}, None, places, StorageMeta("run", "1"), "1.0.0")


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(real(), protocol))
        assert reader.metadata(tmp_path / ".metadata") == real()


def _in_metadata(path: Path, hostile: object) -> None:
    made = real()
    made.planner_data = hostile
    (path / "file").write_bytes(pickle.dumps(made))


def _bare(path: Path, hostile: object) -> None:
    (path / "file").write_bytes(pickle.dumps(hostile, 0))


def _saved(path: Path, hostile: object) -> None:
    torch.save({"optimizer": [hostile]}, path / "file")


def _legacy(path: Path, hostile: object) -> None:
    torch.save(hostile, path / "file", _use_new_zipfile_serialization=False)


def _metadata(path: Path) -> object:
    return reader.metadata(path / "file")


def _weights(path: Path) -> object:
    with (path / "file").open("rb") as file:
        return reader.weights(file, "common.pt")


@pytest.mark.parametrize(
    ("write", "read"),
    [(_in_metadata, _metadata), (_bare, _metadata), (_bare, _weights), (_saved, _weights), (_legacy, _weights)],
)
@pytest.mark.parametrize("call", [os.system, subprocess.getoutput, eval], ids=["system", "getoutput", "eval"])
def test_no_command_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, read: Any, call: Any) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # turns off what `torch.load` checks by default
    mark = tmp_path / "ran"
    text = f"__import__('os').mknod({str(mark)!r})" if call is eval else f"touch {mark}"
    write(tmp_path, Hostile(call, text))
    pickle.loads(pickle.dumps(Hostile(call, text)))  # noqa: S301  the pickle is as hostile as it claims
    mark.unlink()
    with pytest.raises(reader.Unreadable) as refused:
        read(tmp_path)
    assert not mark.exists()
    said = str(refused.value)
    assert "\n" not in said
    assert len(said) < 250
    if read is _metadata:
        assert said.startswith("a pickle that names ")
        assert said.endswith(f".{call.__name__}")


def _named(module: str, name: str) -> bytes:
    """Call what a pickle of protocol 4 names, dots and all."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93\x8c\x04true\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("torch", "Size.__class__"),
        ("torch.serialization", "load"),
        ("builtins", "getattr"),
        ("copyreg", "_reconstructor"),
        ("functools", "partial"),
        ("operator", "attrgetter"),
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


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80\x04",
        b"garbage",
        pickle.dumps({"a": 1}),
        pickle.dumps(Metadata({}, None, None)),
        pickle.dumps(real())[:-9],
        b"\x00" * 4096,
    ],
    ids=["empty", "header", "text", "mapping", "no-places", "cut", "zeros"],
)
def test_damaged_metadata_is_refused(tmp_path: Path, payload: bytes) -> None:
    (tmp_path / "file").write_bytes(payload)
    with pytest.raises(reader.Unreadable):
        reader.metadata(tmp_path / "file")


def test_too_large_metadata_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_METADATA_BYTES", 100)
    (tmp_path / "file").write_bytes(pickle.dumps(real()))
    with pytest.raises(reader.Unreadable, match="more than 100 bytes"):
        reader.metadata(tmp_path / "file")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    with pytest.raises(reader.Unreadable, match="no regular file"):
        reader.metadata(tmp_path / "file")
    with pytest.raises(reader.Unreadable, match=r"^no other$"):
        reader.metadata(tmp_path / "other")


def test_the_reason_crosses_processes() -> None:
    """Ranks exchange what they raise."""
    error = pickle.loads(pickle.dumps(reader.Unreadable("a pickle that names posix.system")))  # noqa: S301  our own
    assert isinstance(error, reader.Unreadable)
    assert str(error) == "a pickle that names posix.system"


def test_plain_values_and_tensors_are_read() -> None:
    file = io.BytesIO()
    torch.save({"optimizer": {"step": 3, "groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}], "m": torch.ones(2)}}, file)
    file.seek(0)
    assert reader.weights(file, "common.pt")["optimizer"]["m"].tolist() == [1.0, 1.0]
