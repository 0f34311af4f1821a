"""Environments of the package `verifiers`: their examples as a task, their rollouts as an agent.

    task: {kind: "asyncmoe.rollout.adapters.verifiers:Examples", options: {environment: gsm8k}}
    environment: {kind: openai, agent: "asyncmoe.rollout.adapters.verifiers:rollout"}

An environment is a taskset of `verifiers.v1`. Its own client speaks to the episode's endpoint, so prompts, tools, turns and rewards are the
environment's. An example's columns name the environment, so that `rollout` finds the same example again.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from asyncmoe import installed
from asyncmoe.errors import UserError
from asyncmoe.rollout.tasks import Example

_MODEL = "policy"
_STARTING = threading.Lock()


class Examples:
    """The examples of an environment. See `asyncmoe.rollout.tasks.types.Finite`.

    Args:
        environment: id of a taskset.
        arguments: fields of the environment's `EnvConfig`, such as `agent` and `taskset`; `environment` is the taskset's `id`.
        limit: maximum number of examples; needed if the taskset is infinite.

    Raises:
        UserError: the environment has no such examples, or needs something that an episode cannot give.
    """

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None, limit: int | None = None) -> None:
        self._columns = {"environment": environment, "arguments": dict(arguments or {}), "limit": limit}
        _, self._tasks = _source(self._columns)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Example:
        data = self._tasks[index].data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        # For records only: the environment itself prompts the policy.
        asked = data.prompt if isinstance(data.prompt, str) else data.description or data.name
        answer = getattr(data, "answer", None)
        prompt = [*system, {"role": "user", "content": asked or f"{self._columns['environment']} {index}"}]
        return Example(prompt, "" if answer is None else str(answer), {**self._columns, "index": index})


async def rollout(base_url: str, api_key: str, prompt: str, answer: str, columns: Mapping[str, Any]) -> float:
    """Run one rollout of the example that `columns` names, and return the environment's reward; see `environment.agent`.

    Raises:
        RuntimeError: the rollout failed in the environment.
    """
    with _STARTING:  # episodes begin in threads of their own
        loop, (config, tasks) = _loop(), _source(columns)
    where = f"{columns['environment']}, task {columns['index']}"
    running = _rolled_out(where, config, tasks[columns["index"]], base_url, api_key)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, loop))


async def _rolled_out(where: str, config: Any, task: Any, base_url: str, api_key: str) -> float:
    from verifiers.v1 import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment

    # An environment for each rollout: a shared one would keep one HTTP client per episode's endpoint until the run ends.
    environment = load_environment(config)
    client = EvalClientConfig(base_url=base_url, api_key_var="ASYNCMOE_NO_KEY", headers={"x-api-key": api_key})
    async with environment.serving():
        episode = await environment.run_episode(task, ModelContext(_MODEL, client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"{where}: {'; '.join(f'{one.type}: {one.message}' for one in errors)[:1000]}")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    if len(rewards) != 1:
        raise RuntimeError(f"{where}: got rewards of {len(rewards)} agents to train, expected the reward of one")
    return float(rewards[0])


def _source(columns: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return the configuration of an environment, and its tasks."""
    return _loaded(columns["environment"], json.dumps(columns["arguments"], sort_keys=True), columns["limit"])


@functools.cache
def _loaded(name: str, arguments: str, limit: int | None) -> tuple[Any, list[Any]]:
    if not installed.has("verifiers"):
        expected = f"the package in the environment of {sys.executable}"
        raise UserError("the package verifiers", got="none", expected=expected, hint=f"run: {installed.fix('verifiers')}")
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    given = json.loads(arguments)
    config = resolve_env_config({**given, "taskset": {**given.get("taskset", {}), "id": name}})
    tasks = load_environment(config).taskset
    if limit is None and not tasks.bounded:
        raise UserError("the option limit", got="none", expected=f"the number of tasks to take, because {name} has no end")
    return config, list(tasks if limit is None else tasks.take(limit))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all rollouts, in a thread of its own: environments share locks and clients among their rollouts."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="verifiers", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # raised in one rollout, these end only that one
            loop.run_forever()
