"""The command of an engine, and its log after a failed start."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.config import Config
from asyncmoe.engines.sglang import connection
from asyncmoe.engines.sglang import process as engine_process
from asyncmoe.errors import AsyncmoeError
from asyncmoe.process import Child
from tests.configs import minimal


def config(trust: bool = False, **engines: object) -> Config:
    model = {"path": "/tmp/m", "trust_remote_code": trust}
    return minimal(model=model, run={"dir": "/tmp/x", "steps": 1, "seed": 40}, engines=engines)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_each_engine_has_its_own_port_and_seed_and_the_users_arguments_last() -> None:
    command = engine_process.command(
        config(count=2, tp=2, ep=2, max_running=7, args=["--log-level", "debug"]), 1, "127.0.0.1", 31000, False, 1, None
    )
    assert option(command, "--port") == "31000"
    assert option(command, "--random-seed") == "41"
    assert option(command, "--tp") == option(command, "--ep") == "2"
    assert option(command, "--max-running-requests") == "7"
    assert "--disable-overlap-schedule" not in command
    assert "--enable-return-routed-experts" not in command
    assert "--enable-return-routed-experts" in engine_process.command(config(), 0, "127.0.0.1", 31000, True, 0, None)
    assert command[-2:] == ["--log-level", "debug"]


def test_the_users_variables_win_and_the_parent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    given = engine_process.environment(config(), 0)
    assert float(given["SGLANG_TIMEOUT_KEEP_ALIVE"]) >= 10 * connection.KEEP_ALIVE_S, (
        "we close idle connections long before the engine does"
    )
    assert given["OMP_NUM_THREADS"] == "6"
    assert int(given["ASYNCMOE_PARENT_PID"]) > 0
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in given


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory"
DIED = "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).\n"
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n'


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("all is well\n", None),
        (TRACE + "OSError: /m does not appear to have a file named config.json\n", "OSError: /m does not appear"),
        (f"[2026-01-01 00:00:00] Scheduler hit an exception: {TRACE}{OUT_OF_MEMORY}\n\n{TRACE}EOFError\n{TRACE}{DIED}", OUT_OF_MEMORY),
        ("usage: server.py\nserver.py: error: unrecognized arguments: --nonsense\n", "unrecognized arguments: --nonsense"),
        (TRACE + "requests.exceptions.ProxyError: HTTPConnectionPool(host='proxy', port=3128): refused\n", "ProxyError"),
        (TRACE + "asyncmoe.platform.sglang.cpu.PatchTargetGone: sglang: got 0.6.0, expected 0.5.23\n", "sglang: got 0.6.0"),
    ],
)
def test_the_cause_is_found_among_its_consequences(log: str, reason: str | None) -> None:
    found = engine_process.reason_in(log)
    assert (found is None) if reason is None else reason in (found or "")


def test_a_program_that_cannot_be_started_is_named_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(AsyncmoeError, match=r"engine\.0: /nowhere/python cannot be started: No such file or directory"):
        Child("engine.0", ["/nowhere/python"], tmp_path / "log")


def test_torch_memory_saver_works_whatever_allocator_a_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    given = engine_process.environment(minimal(placement="colocated"), 0)
    assert given["PYTORCH_CUDA_ALLOC_CONF"] == given["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in engine_process.environment(minimal(), 0)
