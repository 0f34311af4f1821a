"""Checkpoints of a real run in which somebody else has put a pickle that runs a command: they are refused, and nothing is run."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncmoe.errors import DataError
from asyncmoe.trainer.model import checkpoint, mesh, optimizer
from tests.hostile import Hostile
from tests.saving import built, save, small

Load = Callable[[Path], int]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Load]]:
    """A checkpoint, and what loads one."""
    path = tmp_path_factory.mktemp("pickles")
    config = small(path)
    model = built(config)
    adam = optimizer.build(config, model)
    yield save(config, 1, model, adam), lambda folder: checkpoint.load(folder, config, model, None)
    mesh.stop()


def _metadata(folder: Path, hostile: object) -> None:
    found = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  our own
    found.planner_data = hostile
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def _common(folder: Path, hostile: object) -> None:
    found = torch.load(folder / "common.pt", weights_only=True)
    torch.save({**found, "more": hostile}, folder / "common.pt")


def _object(folder: Path, value: object) -> None:
    """Put a value in the place of an object among the tensors, in a file of its own."""
    found = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  our own
    index = next(index for index in found.storage_data if "_extra_state" in index.fqn)
    file = io.BytesIO()
    torch.save(value, file)
    (folder / "more.distcp").write_bytes(file.getvalue())
    found.storage_data[index] = type(found.storage_data[index])("more.distcp", 0, len(file.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def _extra_state(folder: Path, hostile: object) -> None:
    """Plain bytes that Transformer Engine would unpickle."""
    _object(folder, [torch.frombuffer(bytearray(pickle.dumps(hostile)), dtype=torch.uint8)])


def _extra_state_unlisted(folder: Path, hostile: object) -> None:
    _object(folder, torch.frombuffer(bytearray(pickle.dumps(hostile)), dtype=torch.uint8)[None])


def _zarr(folder: Path, hostile: object) -> None:
    """Another format, with a file of objects for each."""
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "common_backend": "torch"}))
    _common(folder, hostile)


@pytest.mark.parametrize("put", [_metadata, _common, _object, _extra_state, _extra_state_unlisted, _zarr])
def test_a_hostile_checkpoint_runs_nothing(saved: tuple[Path, Load], tmp_path: Path, put: Callable[[Path, object], None]) -> None:
    folder, load = saved
    copy, mark = tmp_path / "step-00000001", tmp_path / "ran"
    shutil.copytree(folder, copy)
    assert load(copy) == 1
    put(copy, Hostile(mark))
    with pytest.raises(DataError, match="a checkpoint that asyncmoe has written") as refused:
        load(copy)
    assert not mark.exists()
    assert "\n" not in str(refused.value)
