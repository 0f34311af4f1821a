"""The ranks' rendezvous: on one machine a private file; the end of its keeper is noticed however it ends."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncmoe.errors import WeightSyncError
from asyncmoe.launch import local
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import Header
from asyncmoe.weights.receiver import hosting
from asyncmoe.weights.receiver.control_store import Store, StoreGone

KEEPS = """
import time
from asyncmoe.weights.receiver import hosting
kept = hosting.host("loopback")
print(hosting.place(kept)[0], flush=True)
time.sleep(60)
"""


def test_one_machine_meets_in_a_private_file_that_goes_with_its_keeper() -> None:
    kept = hosting.host("loopback")
    folder = kept.path.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert hosting.place(kept) == (str(kept.path), 0)
    assert hosting.is_held(kept.path)
    path = kept.path
    del kept
    assert not hosting.is_held(path)
    assert not folder.exists()


def test_a_keeper_that_is_killed_is_missed() -> None:
    with subprocess.Popen([sys.executable, "-c", KEEPS], stdout=subprocess.PIPE, text=True) as keeper:
        path = keeper.stdout.readline().strip()
        store = Store("test", 1, path, 0, 5.0)
        store.put(protocol.header(1), Header(1, 1))
        keeper.kill()
        keeper.wait()
        begin = time.monotonic()
        with pytest.raises(StoreGone, match="the trainer's rank 0 is gone"):
            store.get(protocol.header(2), 30.0)
        assert time.monotonic() - begin < 10
    with pytest.raises(WeightSyncError, match="no process hosts the store"):
        Store("test", 1, path, 0, 5.0)
    Path(path).unlink()
    Path(path).with_name("lock").unlink()
    Path(path).parent.rmdir()


def test_only_the_owner_may_enter_the_directory_of_a_run(tmp_path: Path) -> None:
    with local.claim(tmp_path / "run"):
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(0o755)
    with local.claim(tmp_path / "shared"):
        assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755, "as its owner made it"
