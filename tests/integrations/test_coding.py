"""Coding agents from npm work against the endpoint, and cost no token twice: make test-integrations ONLY=coding

The policy's words are a script; tokenizer, endpoint and sessions are those of a run. `ASYNCMOE_COUNTS=FILE` writes the counts there.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

from asyncmoe.rollout.tokenizer import Tokenizer
from tests.integrations.endpoint import call, served
from tests.integrations.traffic import Counts, Recorder, Script, as_record
from tests.unit import openai_policy

PROGRAMS = Path(sys.prefix) / "node_modules"
CLIENT_S = 120


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Attributes:
        package: of npm.
        program: in `node_modules/.bin`.
        first, again: arguments of a first run and of one that continues its conversation; {url} and {folder} are replaced.
        environment: its variables, with {url}, {key} and {folder}.
        shell, argument: its tool for commands, and that tool's parameter.
    """

    package: str
    program: str
    first: Sequence[str]
    again: Sequence[str]
    environment: Mapping[str, str]
    shell: str
    argument: str


_CODEX = (
    *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--model", "policy", "--disable", "multi_agent"),
    *("-c", 'web_search="disabled"', "-c", 'model_provider="ours"'),
    *("-c", 'model_providers.ours={{name="ours", base_url="{url}", env_key="KEY", wire_api="responses"}}'),
)
_QWEN = ("--auth-type", "openai", "--yolo")
AGENTS = (
    Agent("@openai/codex", "codex", (*_CODEX, "do it"), (*_CODEX, "resume", "--last", "again"), {"KEY": "{key}"}, "exec_command", "cmd"),
    Agent(
        "@qwen-code/qwen-code",
        "qwen",
        (*_QWEN, "-p", "do it"),
        (*_QWEN, "--continue", "-p", "again"),
        {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "policy"},
        "run_shell_command",
        "command",
    ),
)


def steps(agent: Agent) -> list[str]:
    """What the policy says: calls alone and together, with odd JSON, wrong arguments, unknown tools and broken calls, and much white space."""

    def shell(command: str, **more: object) -> str:
        return call(agent.shell, json.dumps({**more, agent.argument: command}, ensure_ascii=False))

    odd = f'<tool_call>\n {{"arguments": {{"{agent.argument}" :"echo \\u00e9 \\ud83d\\ude00 \\"q\\" \\\\ /"}}, "name":"{agent.shell}"}}\n</tool_call>'
    return [
        "let me look " + shell("echo one > one.txt; ls"),
        "two at once " + shell("cat one.txt") + "\n" + shell("echo 'é 漢字 \"quoted\" \\ 🦙'"),
        "   spaced  \n\n\ttext \n " + odd,
        "wrong arguments " + call(agent.shell, '{"nothing": 1.0, "other": [1e3, 2.50, null]}'),
        "no such tool " + call("no_such_tool", "{}"),
        "<tool_call>{broken</tool_call> and then " + shell("echo three >> one.txt"),
        "without text before: " + shell("printf '%2000s' x"),
        "it is done.\n\n- one\n- two  ",
        "more " + shell("cat one.txt"),
        "all done",
    ]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return openai_policy.tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def ran(program: Path, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Run a client without any of this process's variables; return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(str(program), *arguments),
        env=dict(environment),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(CLIENT_S):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
            await process.wait()
    return told.decode(errors="replace")


def worked(agent: Agent, known: Tokenizer, folder: Path) -> tuple[Counts, Recorder, list[str]]:
    """Let a client do its task and go on with it."""
    script = Script(known, steps(agent))
    told: list[str] = []
    recorders: list[Recorder] = []

    async def client(url: str, key: str) -> None:
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        async with Recorder(url) as recorder:
            recorders.append(recorder)
            filled = {name: value.format(url=recorder.url, key=key, folder=work) for name, value in agent.environment.items()}
            environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", **filled}
            for arguments in (agent.first, agent.again):
                given = [argument.format(url=recorder.url, folder=work) for argument in arguments]
                told.append(await ran(PROGRAMS / ".bin" / agent.program, given, environment, work))

    episode = served(script.policy, known, client, timeout_s=2 * CLIENT_S + 30)
    return recorders[0].counts(script.policy, episode, known), recorders[0], told


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
def test_a_coding_agents_conversation_is_one_trajectory(agent: Agent, known: Tokenizer, tmp_path: Path) -> None:
    if not (PROGRAMS / ".bin" / agent.program).exists() or shutil.which("node") is None:
        pytest.skip("needs npm: make test-integrations ONLY=coding")
    counts, recorder, told = worked(agent, known, tmp_path)
    version = json.loads((PROGRAMS / agent.package / "package.json").read_text())["version"]
    record(agent.package, version, counts)
    assert "all done" in told[1], told
    assert not counts.errors, counts
    assert (tmp_path / "work" / "one.txt").read_text() == "one\nthree\n"
    assert counts.responses >= len(steps(agent))
    assert (counts.false_forks, counts.retokenised, counts.lost_tokens) == (0, 0, 0), counts


def record(package: str, version: str, counts: Counts) -> None:
    """Add counts to the file of `ASYNCMOE_COUNTS`."""
    if (name := os.environ.get("ASYNCMOE_COUNTS")) is None:
        return
    path = Path(name)
    known = json.loads(path.read_text()) if path.exists() else {"clients": {}}
    known["date"] = date.today().isoformat()
    known["clients"][package] = {"version": version, **as_record(counts)}
    path.write_text(json.dumps(known, indent=2) + "\n")
