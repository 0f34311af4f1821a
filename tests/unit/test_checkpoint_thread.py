"""The threads of two ranks that write a checkpoint, over a store in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from asyncmoe import checkpoints
from asyncmoe.checkpoints import intact
from asyncmoe.config import Config, parse
from asyncmoe.errors import AsyncmoeError, StorageError
from asyncmoe.platform.megatron.snapshot import Planned, Shard
from asyncmoe.trainer.model import checkpoint_files
from asyncmoe.trainer.model.checkpoint_board import Board
from asyncmoe.trainer.model.checkpoint_progress import SaveOutcome
from asyncmoe.trainer.model.checkpoint_thread import SaveTask, SaveThread
from tests.unit.test_checkpoint_files import planned


class Shared:
    """A store with one connection for all."""

    def __init__(self) -> None:
        self._store = HashStore()

    def clone(self) -> Any:
        return self._store


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    store = Shared()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    section = {"ranks": 2, "keep_checkpoints": 1}
    run = {"dir": str(tmp_path / "run"), "steps": 9}
    return parse({"run": run, "model": {"path": str(tmp_path)}, "task": {"kind": "arithmetic"}, "trainer": section})


def begin(
    config: Config,
    step: int,
    copied: Mapping[int, Callable[[], None]] | None = None,
    limit_s: float = 60.0,
    ranks: tuple[int, ...] = (0, 1),
) -> list[SaveThread]:
    """The threads of a save whose ranks write one tensor each."""
    threads = []
    for rank in ranks:
        plan = planned(torch.full((64,), float(step)))
        own = Planned((Shard(f"tensor{rank}", (0,), plan.shards[0].live),), (), plan.metadata, {}, plan.format, (), True)
        board = Board(step, rank, 2, limit_s)
        if rank == 0:
            checkpoints.start(config.run.dir, step)
            board.begin()
        wait = (copied or {}).get(rank, lambda: None)
        copies = [shard.live for shard in own.shards]
        task = SaveTask(config, step, rank, 2, own, copies, wait, {"common": step}, {"step": step})
        threads.append(SaveThread(task, board, "cpu"))
    return threads


def ended(threads: list[SaveThread]) -> list[str]:
    """What each rank raises."""
    found = []
    for thread in threads:
        assert thread.wait(60)
        try:
            thread.check()
            found.append("saved")
        except (AsyncmoeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def broken() -> None:
    raise ValueError("a bug")


def full() -> None:
    raise OSError(28, "No space left on device")


def test_it_becomes_visible_when_the_last_rank_has_written(config: Config) -> None:
    gate = threading.Event()
    threads = begin(config, 1, {1: lambda: gate.wait(60)})
    assert checkpoints.newest(config.run.dir) is None
    assert not any(thread.done() for thread in threads)
    threads[0].check()
    gate.set()
    assert ended(threads) == ["saved", "saved"]
    newest = checkpoints.newest(config.run.dir)
    assert newest == checkpoints.directory(config.run.dir, 1)
    assert intact.fault_in_share(newest, 0, 1) is None
    assert checkpoints.facts(newest)["step"] == 1
    assert ended(begin(config, 2)) == ["saved", "saved"]
    assert checkpoints.newest(config.run.dir) == checkpoints.directory(config.run.dir, 2)
    assert not newest.exists(), "older ones are deleted then"


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_raises_what_one_failed_with(config: Config, rank: int) -> None:
    assert ended(begin(config, 1)) == ["saved", "saved"]
    first, second = ended(begin(config, 2, {rank: full}))
    assert first == second
    assert first.startswith(f"{StorageError.__name__}: checkpoint of step 2: cannot write ")
    assert "No space left on device (ENOSPC)" in first
    assert first.endswith("the run resumes from step-00000001")
    names = [
        f"AsyncmoeError: checkpoint of step 3: {f'trainer rank {rank}: ' if other != rank else ''}ValueError: a bug" for other in (0, 1)
    ]
    assert ended(begin(config, 3, {rank: broken})) == names
    assert [path.name for path in (config.run.dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_failure_of_rank_0s_own_part_is_raised_everywhere(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "write_common", lambda *_: broken())
    first, second = ended(begin(config, 1))
    assert first == "ValueError: a bug"
    assert second == "AsyncmoeError: checkpoint of step 1: trainer rank 0: ValueError: a bug"
    assert checkpoints.newest(config.run.dir) is None


def test_a_rank_that_writes_nothing_is_named(config: Config) -> None:
    (found,) = ended(begin(config, 1, limit_s=0.2, ranks=(0,)))
    assert "rank 1 wrote nothing for 0.2 s (trainer.timeout_s)" in found
    (found,) = ended(begin(config, 2, limit_s=0.2, ranks=(1,)))
    assert "rank 0 has not made the directory of the checkpoint for 0.2 s" in found


class Between:
    """A store in which something happens once, after a `check` has found a key and before what follows it."""

    def __init__(self, store: Any, key: str, happens: Callable[[], None]) -> None:
        self._store, self._key, self._happens = store, key, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        found = bool(self._store.check(keys))
        if found and keys[0].endswith(self._key):
            happens, self._happens = self._happens, lambda: None
            happens()
        return found


def test_a_rank_that_looks_for_progress_while_the_save_ends_learns_its_end(config: Config) -> None:
    first, second = Board(1, 0, 2, 60.0), Board(1, 1, 2, 60.0)
    first.moved()
    second._store = Between(second._store, "moved/0", lambda: first.decide(SaveOutcome()))
    learned: list[SaveOutcome] = []
    waiting = threading.Thread(target=lambda: learned.append(second.verdict()), daemon=True)
    waiting.start()
    waiting.join(10.0)
    assert learned == [SaveOutcome()]
