"""However an `asyncmoe engine` ends, its server ends; and one that cannot start says why in a line."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml

from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.errors import UserError
from tests.engine.conftest import settings
from tests.engine.lifetime import MARK, command_of, marked, wait_until

pytestmark = pytest.mark.engine


class Keeper:
    """`asyncmoe engine`, which waits for its keeper."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(settings(model, folder / "run").model_dump(mode="json")))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncmoe", "engine", str(path), "--name", "engine.0"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def others(self) -> list[str]:
        """Command lines of the processes it started and those started."""
        return [command_of(pid) for pid in marked(self.mark) if pid != self.process.pid]

    def wait_for_spawned(self) -> None:
        """Until the server has spawned processes of its own (multiprocessing's resource tracker, the scheduler, the detokenizer)."""
        wait_until(lambda: len([line for line in self.others() if "spawn_main" in line or "sglang::" in line]) >= 2, 180, "the scheduler")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_no_server_outlives_its_keeper(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    keeper = Keeper(model, tmp_path)
    try:
        keeper.wait_for_spawned()
        keeper.process.send_signal(number)
        keeper.process.wait(30)
        wait_until(lambda: not keeper.others(), 30, f"the end of {keeper.others()}")
    finally:
        keeper.process.kill()
    assert keeper.process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)


@pytest.mark.thorough  # an engine that cannot start: tests/system/test_bad_input.py
def test_a_model_that_cannot_be_loaded_is_one_line(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    keeper = Keeper(broken, tmp_path)
    output, _ = keeper.process.communicate(timeout=300)
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert said[0].startswith(f"error: engine.0 on {socket.gethostname()}: engine.0 did not start: ")
    assert "SafetensorError" in said[0]
    assert str(tmp_path / "run" / "logs" / "engine-0.log") in said[0]
    assert "Traceback" not in output
    assert keeper.process.returncode == 1
    assert keeper.others() == []


def test_a_port_in_use_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1: got Address already in use"):
            SGLangProcess("engine.0", settings(model, tmp_path, port=port), 0, tmp_path)
    assert not (tmp_path / "logs").exists()


def test_a_python_without_sglang_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engines\.python"):
        SGLangProcess("engine.0", settings(model, tmp_path, python=tmp_path / "python"), 0, tmp_path)
