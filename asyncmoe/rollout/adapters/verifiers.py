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
from collections.abc import Mapping, Sequence
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
        arguments: the other fields of the environment's `EnvConfig`, such as `agent` and `taskset`.
        limit: number of examples; needed where a taskset is infinite.

    Raises:
        UserError: the environment has no such examples, or needs what one episode cannot give.
    """

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None, limit: int | None = None) -> None:
        self._limit = limit
        self._columns = {"environment": environment, "arguments": dict(arguments or {}), "limit": limit}
        self._source = _source(self._columns)
        if limit is not None and limit > len(self._source):
            raise UserError("the option limit", got=limit, expected=f"at most {len(self._source)}, the number of examples of {environment}")

    def __len__(self) -> int:
        return len(self._source) if self._limit is None else self._limit

    def __getitem__(self, index: int) -> Example:
        prompt, answer = self._source.example(index)
        return Example(prompt, answer, {**self._columns, "index": index})


async def rollout(base_url: str, api_key: str, prompt: str, answer: str, columns: Mapping[str, Any]) -> float:
    """Run one rollout of the example that `columns` names, and return the environment's reward; see `environment.agent`.

    Raises:
        RuntimeError: the rollout failed in the environment.
    """
    running = asyncio.run_coroutine_threadsafe(_source(columns).rollout(columns["index"], base_url, api_key), _loop())
    return await asyncio.wrap_future(running)


def _source(columns: Mapping[str, Any]) -> _Taskset:
    return _made(columns["environment"], json.dumps(columns["arguments"], sort_keys=True), columns["limit"])


@functools.cache
def _made(environment: str, arguments: str, limit: int | None) -> _Taskset:
    if not installed.has("verifiers"):
        expected = f"it in the environment of {sys.executable}"
        raise UserError("the package verifiers", got="none", expected=expected, hint=f"run: {installed.fix('verifiers')}")
    return _Taskset(environment, json.loads(arguments), limit)


@functools.cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="verifiers", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # of one rollout, which has it as its result: the others go on
            loop.run_forever()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all rollouts, in a thread of its own: environments share locks and clients among their rollouts."""
    with _STARTING:
        return _started()


class _Taskset:
    """An environment of `verifiers.v1`."""

    def __init__(self, name: str, arguments: Mapping[str, Any], limit: int | None) -> None:
        from verifiers.v1.utils.loaders import resolve_env_config

        taskset = {**arguments.get("taskset", {}), "id": name}
        self._name, self._config = name, resolve_env_config({**arguments, "taskset": taskset})
        tasks = self._load().taskset
        if limit is None and not tasks.bounded:
            raise UserError("the option limit", got="none", expected=f"the number of tasks to take, because {name} has no end")
        self._tasks = list(tasks if limit is None else tasks.take(limit))

    def __len__(self) -> int:
        return len(self._tasks)

    def example(self, index: int) -> tuple[Sequence[Mapping[str, str]], str]:
        data = self._tasks[index].data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        # For records alone: the environment itself asks the policy.
        asked = data.prompt if isinstance(data.prompt, str) else data.description or data.name
        answer = getattr(data, "answer", None)
        return [*system, {"role": "user", "content": asked or f"{self._name} {index}"}], "" if answer is None else str(answer)

    async def rollout(self, index: int, base_url: str, api_key: str) -> float:
        from verifiers.v1 import EvalClientConfig, ModelContext

        # Its own environment: it would keep one HTTP client for each episode's endpoint until the run ends.
        environment = self._load()
        client = EvalClientConfig(base_url=base_url, api_key_var="ASYNCMOE_NO_KEY", headers={"x-api-key": api_key})
        async with environment.serving():
            episode = await environment.run_episode(self._tasks[index], ModelContext(_MODEL, client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(f"{self._name}, task {index}: {'; '.join(f'{one.type}: {one.message}' for one in errors)[:1000]}")
        rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
        if len(rewards) != 1:
            raise RuntimeError(f"{self._name}, task {index}: got {len(rewards)} traces of agents to train, expected one reward")
        return float(rewards[0])

    def _load(self) -> Any:
        from verifiers.v1.utils.loaders import load_environment

        return load_environment(self._config)
