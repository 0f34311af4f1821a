"""A run whose log is in Redis: killed with its server, and gone on with, it trains every group once."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from asyncmoe.log import belonging
from asyncmoe.queue.fold import LogState
from asyncmoe.queue.queue_log import CONTROLLER, QueueLog
from tests.redis_server import LocalRedis, needed
from tests.system.runs import logs, metrics, start, wait_for
from tests.system.trained_once import SHAPE, WARM, check, process, trained

pytestmark = [pytest.mark.system, pytest.mark.thorough, needed()]


def recorded(server: LocalRedis, directory: Path) -> LogState:
    """What a log tells after its run."""
    from asyncmoe.log import redis

    ours = belonging.read(directory)
    assert ours is not None
    log = QueueLog(redis.RedisLog(redis.RedisServer(server.url), ours.run, CONTROLLER))
    log.close()
    return log.state


def test_a_run_that_is_killed_with_its_server_trains_everything_once(tmp_path: Path) -> None:
    server, directory = LocalRedis(tmp_path / "redis"), tmp_path / "run"
    shape = (*SHAPE, "trainer.checkpoint_every=5", f"log.redis={server.url}", "run.controller_restarts=0", "engines.orphan_s=5")
    try:
        command = start(directory, *shape)
        assert wait_for(partial(trained, directory, 0, WARM + 2), 150), logs(directory)
        server.kill()
        time.sleep(1.0)  # the run waits for it
        server.start()
        before = len(metrics(directory))
        assert wait_for(partial(trained, directory, before, WARM + 4), 150), logs(directory)
        process(directory, "controller").kill()
        assert command.gone(60), command.alive()
        server.kill()
        server.start()
        status, _, error = start(directory, *shape).finish()
        assert status == 0, error[-3000:] + logs(directory)
        assert not (directory / "log").exists()
        check(directory, known=recorded(server, directory))
    finally:
        server.close()
