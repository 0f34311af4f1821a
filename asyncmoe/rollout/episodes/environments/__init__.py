"""Load the environment that a configuration names: a built-in one or a user's own."""

from __future__ import annotations

import inspect

from asyncmoe import plugins
from asyncmoe.config import Config, sglang_arguments
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.environment import Bounds, Demonstrator, Environment
from asyncmoe.rollout.episodes.environments.single_turn import SingleTurn
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.episodes.openai_endpoint.environment import OpenAIEnvironment
from asyncmoe.rollout.tokenizer import Tokenizer


def bounds(config: Config, tokenizer: Tokenizer) -> Bounds:
    """Return the limits of an episode. A conversation must fit into the context of model and engines."""
    section = config.environment
    context = sglang_arguments.number(config.engines.args, "--context-length")
    tokens = [limit for limit in (section.max_tokens, tokenizer.positions, context) if limit is not None]
    return Bounds(section.max_turns, min(tokens, default=1 << 20), section.max_agents, section.max_paths)


def load(config: Config, tokenizer: Tokenizer | None = None) -> Environment:
    """Return the environment that a configuration names; with a tokenizer, also check that its chat template describes tools
    and accepts their answers.

    Raises:
        ConfigError: no such class, `environment.options` cannot construct it, or it cannot demonstrate and the run has a warm-up; see also
            `WithTools.described`.
        DataError: the chat template cannot render the tools' answers.
    """
    section = config.environment
    if section.kind == "single_turn":
        return SingleTurn()
    if section.kind == "tools":
        given = section.tools
        chat = config.task.chats
        of_servers = given.mcp, given.mcp_sessions
        with_tools = WithTools(given.names, given.style, chat, given.options, given.schemas, *of_servers, section.sandbox, given.on_failure)
        if tokenizer is not None:
            with_tools.described(tokenizer)
            if chat:
                tokenizer.between(["?"])
        made: Environment = with_tools
    elif section.kind == "openai":
        assert section.agent is not None
        made = OpenAIEnvironment(section.agent, section.tools.style)
    else:
        made = _own(section.kind, section.options)
    if config.warmup.steps and not isinstance(made, Demonstrator):
        raise ConfigError(
            "warmup.steps",
            got=config.warmup.steps,
            expected=f"0, because {section.kind} has no method demonstrate(agent, episode) to learn from",
            hint="write one, or start from a model that needs no warm-up",
        )
    return made


def _own(target: str, options: dict[str, object]) -> Environment:
    """Construct `package.module:Class` with keyword arguments."""
    forms = "single_turn, tools, openai or package.module:Class"
    found = plugins.load(target, "environment.kind", forms=forms, wanted="a class that can be imported")
    made: Environment = plugins.make(found, target, options, "environment.kind", "a class that can be made with environment.options")
    if not inspect.iscoroutinefunction(getattr(made, "run", None)):
        raise ConfigError("environment.kind", got=f"{target}, which has no `async def run(self, episode)`", expected="an environment")
    return made
