"""A run with rollout workers whose trajectories lie in a Redis server that is killed: every group is trained once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.redis_server import LocalRedis, needed
from tests.system.runs import logs, metrics, refused, start, wait_for
from tests.system.test_bad_input import arguments
from tests.system.test_journal import SHAPE, WARM, check, trained
from tests.system.test_rollout_workers import TWO

pytestmark = [pytest.mark.system, needed()]


@pytest.mark.thorough
def test_a_run_outlives_the_loss_of_what_its_store_held(tmp_path: Path) -> None:
    server, directory = LocalRedis(tmp_path / "redis", {"maxmemory-policy": "noeviction"}), tmp_path / "run"
    try:
        command = start(directory, *SHAPE, *TWO, "queue.payloads=redis", f"queue.redis={server.url}")
        assert wait_for(partial(trained, directory, 0, WARM + 2), 150), logs(directory)
        server.kill()
        server.start()
        last = metrics(directory)[-1]["step"]
        assert wait_for(partial(trained, directory, 0, last + 2), 150), logs(directory)
        status, _, error = command.finish()
        assert status == 0, error[-3000:] + logs(directory)
        check(directory, again=False)
        with server.client() as client:
            assert not client.keys("asyncmoe:*:payload:*"), "nothing of the run is left"
    finally:
        server.close()


def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    absent = f"unix://{tmp_path}/absent"
    line = refused(*arguments(tmp_path, "queue.payloads=redis", f"queue.redis={absent}", model=tmp_path / "model"))
    assert line.startswith(f"queue.redis: got {absent}: "), line
    assert "expected a Redis server that answers; start it, or name another one; queue.payloads=workers needs none" in line
    assert not (tmp_path / "run" / "logs").exists()
