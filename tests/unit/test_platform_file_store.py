"""A file store does not touch its file at exit: torch's destructor would open it, and abort the process if it is missing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from asyncmoe.platform import file_store


@pytest.mark.parametrize("opened", ["torch", "ours", "an address"])
def test_a_store_that_goes_leaves_its_file_alone(opened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = importlib.import_module("torch.distributed.rendezvous"), tmp_path / "store"
    monkeypatch.setattr(module, "FileStore", vars(module)["FileStore"])  # so that it is put back
    if opened == "an address":
        file_store.install()
        store: Any = next(dist.rendezvous(f"file://{path}", rank=0, world_size=1))[0]
    else:
        store = dist.FileStore(str(path)) if opened == "torch" else file_store.open_store(path)
    store.set("a", b"1")
    size = path.stat().st_size
    del store
    assert (path.stat().st_size == size) == (opened != "torch")
