"""Ctrl-C ends a command in one line with status 130, wherever it arrives; statuses are those of docs/troubleshooting.md."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys

import pytest

from asyncmoe import interrupts
from asyncmoe.engines.engine_stay import ServerLost
from asyncmoe.errors import AsyncmoeError, ConfigError, Interrupted, InvariantBroken
from asyncmoe.rollout import parts
from tests.unit.doc_pages import ROOT, read, tables

PRESSED_IN_AN_IMPORT = """
import os, signal, sys
from importlib.abc import MetaPathFinder
class Press(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("as extension modules do") from None
sys.meta_path.insert(0, Press())
sys.argv = ["asyncmoe", *{arguments!r}]
from asyncmoe.__main__ import main
main()
"""


def ended(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("asyncmoe.cli", interrupts.NOTHING_BEGUN),
        ("asyncmoe.launch.ray", interrupts.NO_RUN_YET),
    ],
)
def test_ctrl_c_while_a_command_is_imported(module: str, said: str) -> None:
    found = ended(PRESSED_IN_AN_IMPORT.format(module=module, arguments=["run", "examples/demo.yaml"]))
    assert (found.returncode, found.stdout, found.stderr) == (130, "", f"{said}\n")


LEFT_BEHIND = """
import asyncio, threading, time
from asyncmoe.errors import UserError
from asyncmoe.launch import part
from asyncmoe.rollout import parts

parts._END_S = 0.1

async def deaf():
    while True:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError:
            pass

async def raises(what):
    raise what

async def main():
    held = [asyncio.create_task(one) for one in (deaf(), raises(SystemExit(4)), raises(KeyboardInterrupt()))]
    held += [asyncio.create_task(asyncio.to_thread(time.sleep, 1e5)) for _ in range(64)]
    threading.Thread(target=time.sleep, args=(1e5,)).start()
    await asyncio.sleep(0.1)
    print(await asyncio.to_thread(str, "a thread was free"))
    ERROR

part.main(lambda: parts.run(main()))
part.end()
"""


@pytest.mark.parametrize(("error", "status"), [("pass", 0), ("raise UserError('a', got='b', expected='c')", 2)])
def test_a_run_ends_whatever_a_users_code_has_left_behind(error: str, status: int) -> None:
    found = ended(LEFT_BEHIND.replace("ERROR", error))
    assert (found.returncode, found.stdout) == (status, "a thread was free\n"), found.stderr


def test_ctrl_c_in_the_first_step_of_a_run_stops_it() -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        parts.run(main())


def test_statuses_are_those_of_the_documentation() -> None:
    table = next(table for table in tables(read("troubleshooting.md")) if re.search(r"(?m)^130$", "\n".join(row[0] for row in table)))
    documented = [int(row[0]) for row in table]
    stopped = [Interrupted("", number).exit_code for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    ours = [0, AsyncmoeError.exit_code, ConfigError.exit_code, InvariantBroken.exit_code, ServerLost.exit_code, *stopped]
    assert documented == ours
