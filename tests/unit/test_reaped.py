"""What a user's scorer or tool has started ends with its process, also what left its session."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from asyncmoe.rollout import reaped
from asyncmoe.rollout.episodes.tools import function
from asyncmoe.rollout.scoring.types import Sample
from asyncmoe.rollout.scoring.workers import InWorkers

FORKS = '''
import os, time

def forks(given=None, **more):
    """Starts a process that leaves its session, and says its id."""
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    with open({file!r}, "w") as file:
        file.write(str(child))
    return {answer}
'''


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(process: int) -> bool:
    until = time.monotonic() + 10
    while alive(process) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(process)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that gets the id of what a module's function has started."""
    file = tmp_path / "child"
    for name, answer in (("my_forking_tool", "'text'"), ("my_forking_scorer", "1.0")):
        (tmp_path / f"{name}.py").write_text(FORKS.format(file=str(file), answer=answer).replace("given=None, **more", "given"))
    scorer = tmp_path / "my_forking_scorer.py"
    scorer.write_text(scorer.read_text().replace("forks(given)", "forks(prompt, response, answer)"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    return file


def test_a_tool_leaves_no_process(child: Path) -> None:
    async def call() -> None:
        tool = function.load("my_forking_tool:forks")
        assert await tool.call("x") == "text"
        assert alive(int(child.read_text()))
        await tool.close()

    asyncio.run(call())
    assert gone(int(child.read_text()))


def test_a_scorer_leaves_no_process(child: Path) -> None:
    async def call() -> None:
        workers = InWorkers("my_forking_scorer:forks", {}, False, 20.0, 1)
        assert await workers.call(Sample(prompt="p", response="r", answer="a")) == {"reward": 1.0}
        assert alive(int(child.read_text()))
        await workers.close()

    asyncio.run(call())
    assert gone(int(child.read_text()))


def test_what_a_process_prints_is_bounded_and_it_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys\nfor _ in range(200): print('flood' * 2000, file=sys.stderr)\nprint('done')\nsys.exit('last words')"

    async def call(code: str) -> bytes:
        process = await reaped.start((sys.executable, "-c", code), 2**16)
        assert process.stdout is not None
        said = await process.stdout.readline()
        assert await process.wait() == 1
        return said

    assert asyncio.run(call(code)) == b"done\n"
    flood = capfd.readouterr().err
    assert reaped.SAID_BYTES < len(flood) < reaped.SAID_BYTES + 500
    assert flood.endswith("the rest is dropped\n")
    assert asyncio.run(call("import sys; sys.exit('last words')")) == b""
    assert capfd.readouterr().err == "last words\n"


@pytest.mark.parametrize(
    "leaves", ["os._exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(60)", "signal.signal(15, signal.SIG_IGN); time.sleep(60)"]
)
def test_it_ends_with_its_descendants(leaves: str) -> None:
    code = "import os, signal, sys, time\nif os.fork() == 0:\n  os.setsid()\n  print(os.getpid(), flush=True)\n  time.sleep(60)\n"
    code += f"time.sleep(0.3)\n{leaves}"

    async def call() -> int:
        process = await reaped.start((sys.executable, "-c", code), 2**16)
        assert process.stdout is not None
        child = int(await process.stdout.readline())
        await reaped.end(process, "it")
        return child

    assert gone(asyncio.run(call()))
