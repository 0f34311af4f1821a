"""User errors: one clear line, a non-zero status, no leftover process and no partial output."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.disks import mounted
from tests.redis_server import needed
from tests.system.runs import ONE_RANK, demo, engine_python, refused, silent_engines

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.make=null"], ["/model", "expected"]),
        (["scoring.scorer=json:reward"], ["scoring.scorer: got json:reward"]),
        pytest.param(["log.redis=unix:///absent"], ["log.redis: unix:///absent (", "does not answer: bring it back"], marks=needed()),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    """Each takes a process; values and combinations are those of tests/unit/test_config.py."""
    line = refused(*demo(tmp_path / "run", *overrides, f"model.path={tmp_path / 'model'}"))
    assert all(word in line for word in words), line
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "run" / "logs").exists()


def test_a_wrong_argument_is_named(tmp_path: Path) -> None:
    assert "no such file" in refused("run", str(tmp_path / "none.yaml"))
    assert "1 to 1, because rollout.workers is 1" in refused("worker", "examples/demo.yaml", f"run.dir={tmp_path / 'run'}", "--number", "2")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(*demo(tmp_path / "run", f"engines.port={port}", *ONE_RANK))
    assert str(port) in line
    assert "in use" in line


def test_an_engine_that_dies_at_start_says_why(tmp_path: Path) -> None:
    """Report it in one line, though two ranks wait for it."""
    line = refused(*demo(tmp_path / "run", "engines.args=['--page-size', 'nonsense']"))
    assert "--page-size" in line
    assert "engine" in line


def test_an_engine_whose_python_changes_a_setting_of_nccl_is_named(tmp_path: Path) -> None:
    line = refused(*demo(tmp_path / "run", engine_python(tmp_path, "export NCCL_CUMEM_ENABLE=1"), *ONE_RANK))
    assert "engine.0 did not start: " in line
    assert f"on {socket.gethostname()}: got NCCL_CUMEM_ENABLE 1, expected NCCL_CUMEM_ENABLE 0 as its starter" in line
    assert "export the same variables before both start" in line


def test_a_full_disk_names_role_node_reason_and_cure_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    node = socket.gethostname()
    with mounted(tmp_path / "disk", "8m") as disk:  # for two checkpoints of the small run, not for three
        line = refused(*demo(disk / "run", "trainer.checkpoint_every=1", silent_engines(tmp_path)))
        role, _, what = line.partition(": ")
        assert re.fullmatch(rf"(trainer\.[01]|controller) on {node}", role), line
        assert re.search(rf"cannot write {disk}\S+ on {node}: No space left on device \(ENOSPC\), .* GiB free; make room", what), line
        complete = [path for path in (disk / "run" / "checkpoints").iterdir() if not path.suffix]
        assert complete
        assert all((path / "asyncmoe.json").is_file() for path in complete)
