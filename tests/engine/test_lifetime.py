"""However an `asyncmoe engine` ends, its server ends too. Failing starts: tests/system/test_bad_input.py."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from tests.engine.conftest import ended, settings
from tests.system.runs import Command, command_line, wait_for

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_no_server_outlives_its_keeper(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """When the server has spawned processes of its own: multiprocessing's resource tracker, the scheduler, the detokenizer."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(model, tmp_path / "run").model_dump(mode="json")))
    command = Command("engine", str(path), "--name", "engine.0", log=tmp_path / "log")
    keeper = psutil.Process(command.process.pid)

    def spawned() -> list[psutil.Process]:
        return [one for one in keeper.children(recursive=True) if re.search("spawn_main|sglang::", command_line(one))]

    try:
        assert wait_for(lambda: len(spawned()) >= 2, 180), (tmp_path / "log").read_text()
        family = keeper.children(recursive=True)
        command.process.send_signal(number)
        assert command.process.wait(30) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        assert ended(family, 30)
        assert command.gone(), command.alive()
    finally:
        command.process.kill()
