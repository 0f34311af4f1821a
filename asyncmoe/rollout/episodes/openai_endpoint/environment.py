"""Episodes driven by an agent that speaks OpenAI's chat completions or Responses API, or Anthropic's Messages API."""

from __future__ import annotations

from functools import partial
from typing import cast

from asyncmoe import plugins
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes.environment import Episode, Rewards
from asyncmoe.rollout.episodes.openai_endpoint.answers import HERMES
from asyncmoe.rollout.episodes.openai_endpoint.server import OpenAIEndpoint
from asyncmoe.rollout.episodes.openai_endpoint.threads import Threads

ERROR, TIMEOUT = "agent_error", "agent_timeout"


class OpenAIEnvironment:
    """Runs a user's agent, every episode with an endpoint of its own.

    The agent is `async def agent(base_url: str, api_key: str, prompt: str, answer: str) -> float | None`, or the same without `async`. It
    may also take `columns`, the example's other columns. It returns the episode's reward, or None if the configured scorer scores the
    episode. It runs in a thread of its own, so it may block. It sends requests with `openai.AsyncOpenAI(base_url=base_url,
    api_key=api_key)` or any other client; every model name means the policy.

    Args:
        agent: `package.module:function`.
        timeout_s: maximum run time of the agent, in seconds.
        style: as `environment.tools.style`.

    Raises:
        ConfigError: no such function.
    """

    def __init__(self, agent: str, *, timeout_s: float = 600.0, style: str = HERMES) -> None:
        self._function = plugins.load_function(agent, "environment.agent", forms="package.module:function")
        self._takes_columns = plugins.takes(self._function, "columns")
        self._timeout_s = timeout_s
        self._endpoint, self._threads = OpenAIEndpoint(style), Threads()

    async def run(self, episode: Episode) -> Rewards:
        """See `Environment`.

        Raises:
            TrajectoryRejected: "agent_error", "agent_timeout", or what the agent raised with a reason of its own.
            UserError: too many agents have not ended after their timeouts.
        """
        episode.failure = self._threads.too_many()
        episode.check()
        session, url = await self._endpoint.open(episode)
        asked = episode.prompt
        function = partial(self._function, columns=asked.columns) if self._takes_columns else self._function
        call = partial(self._threads.call, function, url, session.key, asked.text, asked.answer)
        try:
            reward = await plugins.awaited(call, self._timeout_s, "the agent")
        except plugins.Overdue as error:
            raise TrajectoryRejected(TIMEOUT, str(error)) from error
        except Exception as error:
            episode.check()  # an agent raises if its requests fail; the cause of that failure is more informative
            if isinstance(error, TrajectoryRejected):
                raise
            raise TrajectoryRejected(ERROR, plugins.told(error)) from error
        finally:
            await self._endpoint.end(session)
        return cast(Rewards, reward)

    async def close(self) -> None:
        """Stop the endpoint."""
        await self._endpoint.close()
