"""Coding agents from npm work against the endpoint, and cost no token twice: make test-integrations ONLY=coding

The policy's words are a script; tokenizer, endpoint and sessions are those of a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.integrations.endpoint import call, rewarded, sampled_in, served
from tests.unit import doc_pages
from tests.unit.openai_policy import IM_END, Policy

PROGRAMS = Path(sys.prefix) / "node_modules"
CLIENT_S = 120
NUMBER = re.compile(r"#(\d+) ")


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
    another: str
    """A call of another tool of its own."""
    rewrites: bool = False
    """Whether it changes the beginning of a conversation when it goes on, so that what was said comes back as text."""


_CODEX = (
    *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--model", "policy"),
    *("-c", 'web_search="disabled"', "-c", 'model_provider="ours"'),
    *("-c", 'model_providers.ours={{name="ours", base_url="{url}", env_key="KEY", wire_api="responses"}}'),
)
_CLAUDE = ("--model", "policy", "--allowedTools", "Bash,Glob")
_QWEN = ("--auth-type", "openai", "--yolo")
AGENTS = (
    Agent(
        "@openai/codex",
        "codex",
        (*_CODEX, "do it"),
        (*_CODEX, "resume", "--last", "again"),
        {"KEY": "{key}"},
        "exec_command",
        "cmd",
        call("multi_agent_v1__close_agent", '{"target": "nobody"}'),
    ),
    Agent(
        "@anthropic-ai/claude-code",
        "claude",
        (*_CLAUDE, "-p", "do it"),
        (*_CLAUDE, "--continue", "-p", "again"),
        {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "{key}", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        "Bash",
        "command",
        call("Glob", '{"pattern": "*.txt"}'),
    ),
    Agent(
        "@qwen-code/qwen-code",
        "qwen",
        (*_QWEN, "-p", "do it"),
        (*_QWEN, "--continue", "-p", "again"),
        {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "policy"},
        "run_shell_command",
        "command",
        call("list_directory", '{"path": "/proc/sys"}'),
        rewrites=True,
    ),
)


def steps(agent: Agent) -> list[str]:
    """What the policy says: calls alone and together, odd JSON, wrong arguments, unknown tools, broken calls, much white space."""

    def shell(command: str, **more: object) -> str:
        return call(agent.shell, json.dumps({**more, agent.argument: command}, ensure_ascii=False))

    odd = """{"arguments": {"ARGUMENT" :"echo \\u00e9 \\ud83d\\ude00 \\"q\\" \\\\ /"}, "name":"SHELL"}"""
    odd = f"<tool_call>\n {odd.replace('ARGUMENT', agent.argument).replace('SHELL', agent.shell)}\n</tool_call>"
    return [
        "let me look " + shell("echo one > one.txt; ls"),
        "two at once " + shell("cat one.txt") + "\n" + shell("echo 'é 漢字 \"quoted\" \\ 🦙'"),
        "   spaced  \n\n\ttext \n " + odd,
        "wrong arguments " + call(agent.shell, '{"nothing": 1.0, "other": [1e3, 2.50, null]}'),
        "another tool " + agent.another,
        "no such tool " + call("no_such_tool", "{}"),
        "<tool_call>{broken</tool_call> and then " + shell("echo three >> one.txt"),
        "without text before: " + shell("printf '%2000s' x"),
        "it is done.\n\n- one\n- two  ",
        "more " + shell("cat one.txt"),
        "all done",
    ]


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


def scripted(known: Tokenizer, said: Sequence[str]) -> Policy:
    """A policy that answers step by step: the step of a conversation follows from what the policy sees of it. Each response begins with its
    number ("#7 "), by which it is found again."""
    numbers = count(1)

    def say(seen: tuple[int, ...]) -> tuple[int, ...]:
        done = len({*NUMBER.findall(known.decode(seen))})
        return (*known.encode(f"#{next(numbers)} {said[min(done, len(said) - 1)]}"), IM_END)

    return Policy(say)


def worked(agent: Agent, policy: Policy, known: Tokenizer, folder: Path) -> tuple[Episode, list[str]]:
    """Let a client do its task and go on with it; the episode, and what the client printed."""
    told: list[str] = []
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()

    async def client(url: str, key: str) -> None:
        filled = {name: value.format(url=url, key=key) for name, value in agent.environment.items()}
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", **filled}
        for arguments in (agent.first, agent.again):
            given = [argument.format(url=url, folder=work) for argument in arguments]
            told.append(await ran(PROGRAMS / ".bin" / agent.program, given, environment, work))

    return served(policy, known, client, timeout_s=2 * CLIENT_S + 30), told


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
def test_a_coding_agents_conversation_is_one_trajectory(agent: Agent, known: Tokenizer, tmp_path: Path) -> None:
    if not (PROGRAMS / ".bin" / agent.program).exists() or shutil.which("node") is None:
        pytest.skip("needs npm: make test-integrations ONLY=coding")
    policy = scripted(known, steps(agent))
    episode, told = worked(agent, policy, known, tmp_path)
    assert "all done" in told[1], told
    assert (tmp_path / "work" / "one.txt").read_text() == "one\nthree\n"
    assert len(policy.asked) >= len(steps(agent))
    sampled = sum(len(said) for _, _, said in policy.asked)
    assert sampled_in(episode) == sampled, "every sampled token is in a trajectory"
    again = [known.decode(given) for _, given, _ in policy.asked if NUMBER.search(known.decode(given))]
    assert agent.rewrites or not again, "what was sampled came back as text"


def test_the_coding_agent_of_the_page_is_rewarded(known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PROGRAMS / ".bin" / "codex").exists():
        pytest.skip("needs npm: make test-integrations ONLY=coding")
    monkeypatch.setenv("PATH", f"{PROGRAMS / '.bin'}{os.pathsep}{os.environ['PATH']}")
    page: dict[str, Any] = {}
    exec(doc_pages.files(doc_pages.read("guides/agents.md"))["my_coder.py"], page)
    policy = scripted(known, [call("exec_command", '{"cmd": "echo 42 > answer.txt"}'), "done"])
    asked = ("Write the answer into answer.txt.", "42")
    reward, _ = rewarded(policy, known, lambda url, key: page["codex"](url, key, *asked), timeout_s=CLIENT_S)
    assert reward == 1.0
    assert {name for name, _, _ in policy.asked} == {"policy"}
