"""A store in a file leaves the file alone when it goes: the destructor of torch's would open it, and abort the process if it is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OPENED = {
    "torch": "import torch.distributed as dist; store = dist.FileStore(path)",
    "ours": "from asyncmoe.platform.file_store import open_store; store = open_store(path)",
    "an address": "from asyncmoe.platform import file_store; file_store.install(); "
    "import torch.distributed as dist; store, *_ = next(dist.rendezvous(f'file://{path}', rank=0, world_size=1))",
}
USED = "store.set('a', b'1'); print(os.path.getsize(path), flush=True)"


@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("gone", ["del store", "pass"])
def test_a_store_that_goes_leaves_its_file_alone(opened: str, gone: str, tmp_path: Path) -> None:
    path = tmp_path / "store"
    program = f"import os, sys; path = sys.argv[1]; {OPENED[opened]}; {USED}; {gone}"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (path.stat().st_size == int(done.stdout)) == (opened != "torch")
