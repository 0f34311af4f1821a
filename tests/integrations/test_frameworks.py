"""Agent frameworks with their defaults: the OpenAI Agents SDK and LangGraph. make test-integrations ONLY=frameworks

Each agent is what a user writes for `environment.agent`, as docs/guides/agents.md has it. Other dialects: test_clients.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.integrations.endpoint import call, in_turn, one_conversation, served
from tests.unit import doc_pages
from tests.unit.openai_policy import Policy

WHY = "make test-integrations ONLY=frameworks installs it"
agents = pytest.importorskip("agents", reason=WHY)
pytest.importorskip("langchain", reason=WHY)


PAGE: dict[str, Any] = {}
exec(doc_pages.files(doc_pages.read("guides/agents.md"))["my_agents.py"], PAGE)
double, solve, graph = PAGE["double"], PAGE["solve"], PAGE["graph"]


def played(policy: Policy, known: Tokenizer, agent: Any) -> tuple[float, Episode]:
    rewards = []

    async def client(url: str, key: str) -> None:
        rewards.append(await agent(url, key, "twice 21?", "42"))

    episode = served(policy, known, client)
    return rewards[0], episode


async def hand_off(base_url: str, api_key: str, prompt: str, answer: str) -> float:
    """Two agents, the first of which hands over to the second. A provider belongs to this episode; a default client, to the process."""
    import openai
    from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        calculator = Agent(name="calculator", instructions="use the tool", tools=[function_tool(double)])
        clerk = Agent(name="clerk", instructions="send everybody on", handoffs=[calculator])
        run = RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)
        result = await Runner.run(clerk, prompt, run_config=run)
        return float(result.last_agent.name == "calculator" and result.final_output.split()[-1] == answer)


@pytest.mark.parametrize("agent", [solve, graph])
def test_an_agent_with_a_tool_is_one_trajectory(known: Tokenizer, agent: Any) -> None:
    policy = in_turn(known, "let me see " + call("double", '{"x": 21}'), "it is 42")
    reward, episode = played(policy, known, agent)
    assert reward == 1
    assert len(policy.asked) == 2
    one_conversation(policy, known)
    assert sum(sum(agent.sampled) for agent in episode.agents.values()) == sum(len(said) for _, _, said in policy.asked)


def test_a_hand_off_begins_another_conversation(known: Tokenizer) -> None:
    """The second agent has instructions of its own: another prompt, so nothing sampled before can be reused."""
    policy = in_turn(known, call("transfer_to_calculator", "{}"), call("double", '{"x": 21}'), "it is 42")
    reward, episode = played(policy, known, hand_off)
    assert reward == 1
    assert [name for name, _, _ in policy.asked] == ["policy", "policy/2", "policy/2"]
    assert list(episode.agents) == ["policy", "policy/2"]


def test_agents_of_one_process_at_once(known: Tokenizer) -> None:
    """Episodes run at once in one process: what each got is its own policy's."""

    def reward(n: int) -> float:
        return played(in_turn(known, f"it is {n}"), known, graph)[0]

    async def run() -> list[float]:
        return await asyncio.gather(asyncio.to_thread(reward, 42), asyncio.to_thread(reward, 43))

    assert asyncio.run(run()) == [1, 0]
