"""Agent frameworks with their defaults, the OpenAI Agents SDK and LangGraph, and Anthropic's own client.

make test-integrations ONLY=frameworks

Agents are what a user writes for `environment.agent`, as docs/guides/agents.md has it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.integrations.endpoint import call, in_turn, one_conversation, rewarded, sampled_in, served
from tests.unit import doc_pages, openai_policy
from tests.unit.openai_policy import IM_END, Policy

WHY = "make test-integrations ONLY=frameworks installs it"
agents = pytest.importorskip("agents", reason=WHY)
anthropic = pytest.importorskip("anthropic", reason=WHY)
pytest.importorskip("langchain", reason=WHY)


PAGE: dict[str, Any] = {}
exec(doc_pages.files(doc_pages.read("guides/agents.md"))["my_agents.py"], PAGE)
double, solve, graph = PAGE["double"], PAGE["solve"], PAGE["graph"]


def played(policy: Policy, known: Tokenizer, agent: Any) -> tuple[float, Episode]:
    return rewarded(policy, known, lambda url, key: agent(url, key, "twice 21?", "42"))


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
    assert sampled_in(episode) == sum(len(said) for _, _, said in policy.asked)


def test_a_hand_off_begins_another_conversation(known: Tokenizer) -> None:
    """The second agent has instructions of its own: another prompt, so nothing sampled before can be reused."""
    policy = in_turn(known, call("transfer_to_calculator", "{}"), call("double", '{"x": 21}'), "it is 42")
    reward, episode = played(policy, known, hand_off)
    assert reward == 1
    first, second = episode.agents
    assert [name for name, _, _ in policy.asked] == [first, second, second]


def test_agents_of_one_process_at_once(known: Tokenizer) -> None:
    """Episodes run at once in one process: what each got is its own policy's."""

    def reward(n: int) -> float:
        return played(in_turn(known, f"it is {n}"), known, graph)[0]

    async def run() -> list[float]:
        return await asyncio.gather(asyncio.to_thread(reward, 42), asyncio.to_thread(reward, 43))

    assert asyncio.run(run()) == [1, 0]


# ---------------------------------------------------------------- clients as their authors publish them

CALL = 'let me see <tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'
TOOL: Any = {"name": "double", "description": "Twice x", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose prompts show the tools."""
    made = openai_policy.tokenizer(tmp_path_factory.mktemp("tools"))
    made._tokenizer.chat_template = "{{ tools }}" + made._tokenizer.chat_template
    return made


def calls_then_answers(known: Tokenizer) -> Policy:
    """A policy that calls the tool until it has seen its answer."""
    return Policy(lambda seen: (*known.encode("it is 42" if "42" in known.decode(seen) else CALL), IM_END))


@pytest.mark.parametrize("suffix", ["/v1", ""])
def test_anthropics_client_calls_tools(shown: Tokenizer, suffix: str) -> None:
    policy = calls_then_answers(shown)

    async def client(url: str, key: str) -> None:
        base = url.removesuffix("/v1") + suffix
        async with anthropic.AsyncAnthropic(base_url=base, api_key=key) as client:
            asked: Any = {"model": "claude", "max_tokens": 90, "system": "be brief", "tools": [TOOL]}
            messages: list[Any] = [{"role": "user", "content": "twice 21?"}]
            raw = await client.messages.with_raw_response.create(**asked, messages=messages, extra_body={"temperature": 0.0})
            assert raw.headers["asyncmoe-overridden"] == "temperature"
            first = anthropic.types.Message.model_validate((await raw.parse()).to_dict())
            text, use = first.content
            assert (text.text, use.name, use.input, first.stop_reason) == ("let me see", "double", {"x": 21}, "tool_use")
            assert first.usage.output_tokens == len(policy.asked[0][2])
            assert (await client.messages.count_tokens(model="claude", messages=messages, system="be brief", tools=[TOOL])).input_tokens > 0
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "42"}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            async with client.messages.stream(**asked, messages=messages) as stream:
                pieces = [piece async for piece in stream.text_stream]
                last = await stream.get_final_message()
            assert "".join(pieces) == last.content[0].text == "it is 42"
            assert (last.stop_reason, last.usage.output_tokens) == ("end_turn", len(policy.asked[1][2]))

    served(policy, shown, client)
    one_conversation(policy, shown)


def test_anthropics_client_streams_calls_and_gets_errors_as_its_own(shown: Tokenizer) -> None:
    policy = calls_then_answers(shown)

    async def client(url: str, key: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
            asked: Any = {"model": "claude", "max_tokens": 90, "messages": [{"role": "user", "content": "twice 21?"}]}
            async with client.messages.stream(**asked, tools=[TOOL]) as stream:
                told = await stream.get_final_message()
            assert [block.type for block in told.content] == ["text", "tool_use"]
            assert told.content[1].input == {"x": 21}
            stopped = await client.messages.create(**asked, stop_sequences=["me"])
            assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("let ", "stop_sequence", "me")
            with pytest.raises(anthropic.BadRequestError, match="mcp_servers is not supported"):
                await client.messages.create(**asked, extra_body={"mcp_servers": []})
        async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**asked)

    served(policy, shown, client)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_the_agents_sdk_runs_its_loop(shown: Tokenizer, api: str, streamed: bool) -> None:
    import openai

    policy = calls_then_answers(shown)
    agents.set_tracing_disabled(True)
    seen: list[int] = []

    @agents.function_tool
    def double(x: int) -> str:
        """Twice x."""
        seen.append(x)
        return str(2 * x)

    async def client(url: str, key: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            agent = agents.Agent(name="a", instructions="be brief", model=kind(model="policy", openai_client=client), tools=[double])
            if streamed:
                running = agents.Runner.run_streamed(agent, "twice 21?")
                events = [event async for event in running.stream_events()]
                assert any(event.type == "raw_response_event" for event in events)
                assert running.final_output == "it is 42"
            else:
                assert (await agents.Runner.run(agent, "twice 21?")).final_output == "it is 42"

    served(policy, shown, client)
    assert seen == [21]
    one_conversation(policy, shown)
