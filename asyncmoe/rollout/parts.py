"""Build the parts of a controller and its workers from the configuration: tokenizer, tasks, scorer, environment and engine pool."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from asyncmoe import plugins
from asyncmoe.config import Config
from asyncmoe.engines import adapters
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import Sampling
from asyncmoe.errors import Faults, together
from asyncmoe.models import make
from asyncmoe.rollout import tasks
from asyncmoe.rollout.demonstrations import Demonstrations
from asyncmoe.rollout.episodes import environments
from asyncmoe.rollout.episodes.environment import Demonstrator, Environment
from asyncmoe.rollout.episodes.episode import RolloutContext, Teaching
from asyncmoe.rollout.scoring import loading, trial
from asyncmoe.rollout.scoring.plugin import close_own
from asyncmoe.rollout.scoring.types import Scorer
from asyncmoe.rollout.tasks import Tasks
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Recording

_MOST_THREADS, _END_S = 4096, 15.0


@dataclass(frozen=True)
class RolloutParts(Tasks):
    """What episodes need."""

    scorer: Scorer
    environment: Environment
    teacher: Scorer | None = None

    async def close(self) -> None:
        """Close the scorer, the teacher and the environment."""
        scoring = (one.close() for one in (self.scorer, self.teacher) if one is not None)
        # Tools may have servers to end.
        await asyncio.gather(*scoring, close_own(self.environment, "the environment", seconds=60.0))


class _Unawaited(ThreadPoolExecutor):
    """The loop's threads, also for users' `asyncio.to_thread`. A thread that never ends blocks no other call and is not awaited."""

    def __init__(self) -> None:
        super().__init__(_MOST_THREADS, "loop")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run an event loop until a coroutine has ended. Remaining threads are not awaited, remaining tasks only for `_END_S`.

    SystemExit or KeyboardInterrupt in another task, such as one started by a user's code, ends only that task, and is raised where that
    task is awaited. The exception stops the loop (asyncio's `Task` raises it twice), which then resumes.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    pressed = True  # until `ended` begins: a task that is cancelled before never runs

    async def begun() -> None:
        await asyncio.sleep(0)  # `ended` waits from the first step of `main` on, which may take long
        await main

    async def ended() -> None:
        nonlocal pressed
        pressed = False
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # by the runner, at Ctrl-C
            pressed = True
            raise

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        loop.set_default_executor(_Unawaited())
        task = loop.create_task(begun())
        for wait in (ended, lambda: plugins.ended(asyncio.all_tasks(loop), _END_S)):
            over = False
            while not over:
                try:
                    runner.run(wait())
                    over = True
                except (SystemExit, KeyboardInterrupt):
                    if pressed:
                        raise
        task.result()


def questions(config: Config) -> Tasks:
    """Load the questions. Raises as `load` does."""
    return tasks.load(config, Tokenizer(config.model.path, config.model.trust_remote_code, config.task.chat_template_kwargs))


def load(config: Config) -> RolloutParts:
    """Load the parts.

    Raises:
        UserError: names all parts that are unusable.
    """
    faults = Faults()
    asked = faults.of(questions, config)
    environment = faults.of(environments.load, config, None if asked is None else asked.tokenizer)
    decode = str if asked is None else asked.tokenizer.decode
    scorer = faults.of(loading.load, config.scoring, config.task, decode, config.run.seed)
    teacher = faults.of(loading.load_teacher, config.scoring, config.run.seed)
    if faults.found or asked is None or environment is None or scorer is None:
        raise together(faults.found)
    return RolloutParts(asked.tokenizer, asked.training, asked.sets, scorer, environment, teacher)


def try_all(config: Config, *, own: bool) -> None:
    """Load the parts, try them as before a run, and close them. If the model is not made yet, its tokenizer suffices.

    Args:
        own: false: the user's own code has failed in a process of its own, and is not run in this one.

    Raises:
        UserError: names all parts that are unusable.
    """
    with tempfile.TemporaryDirectory(prefix="asyncmoe-trial-") as scratch:
        made = config.model.make
        if made is not None and make.to_make(config.model, config.run.dir):
            Path(scratch, "config.json").write_text(json.dumps(make.settings(made)))
            make.write_tokenizer(Path(scratch), made.context)
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": Path(scratch)})})
        if own:
            run(_load_and_try(config))
        elif not plugins.is_name(config.task.kind):
            questions(config)


async def _load_and_try(config: Config) -> None:
    parts = load(config)
    try:
        await trial.before_engines(config, parts, parts.scorer, parts.teacher)
    finally:
        await parts.close()


def pool_of(config: Config, limit: int, generated: Callable[[str, float, float], None] = lambda *_: None) -> Pool:
    """Return a pool that engines join, with a limit on the requests in flight. `generated` is called like `Recorder.generated`."""
    rollout, asked, dp_ranks = config.rollout, adapters.asked(config), config.engines.dp_attention
    return Pool((), limit, rollout.request_timeout_s, generated, order=rollout.order, adapter=asked, dp_ranks=dp_ranks)


def context_of(config: Config, parts: RolloutParts, pool: Pool, recording: Recording) -> RolloutContext:
    """Return the context of all episodes. `recording`: what engines report of each token."""
    rollout, tokenizer = config.rollout, parts.tokenizer
    sampling = Sampling(
        rollout.temperature,
        rollout.max_new_tokens,
        (tokenizer.eos,),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        recording=recording,
    )
    return RolloutContext(
        pool,
        sampling,
        tokenizer,
        parts.scorer,
        parts.environment,
        environments.bounds(config, tokenizer),
        config.environment.timeout_s,
        rollout.interruption,
        config.run.seed,
        teacher=parts.teacher,
    )


def demonstrations_of(config: Config, parts: RolloutParts) -> Demonstrations:
    """Return the demonstrations of the warm-up."""
    bounds, environment, teaching = environments.bounds(config, parts.tokenizer), parts.environment, None
    if isinstance(environment, Demonstrator):
        # The teacher may play an episode of any length: `Demonstrations` measures it and replaces a question that is too long.
        free = replace(bounds, tokens=sys.maxsize)
        teaching = Teaching(environment, parts.tokenizer, free, config.run.seed)
    return Demonstrations(parts.training, teaching, config.warmup.steps * config.warmup.batch, bounds.tokens)
