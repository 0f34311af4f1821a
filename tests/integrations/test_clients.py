"""Clients as their authors publish them, against the endpoint: Anthropic's own, and the OpenAI Agents SDK with its default API.

make test-integrations ONLY=clients
"""

from __future__ import annotations

from typing import Any

import pytest

from asyncmoe.rollout.tokenizer import Tokenizer
from tests.integrations.endpoint import one_conversation, served
from tests.unit import openai_policy
from tests.unit.openai_policy import IM_END, Policy

anthropic = pytest.importorskip("anthropic", reason="make test-integrations ONLY=clients installs anthropic")
agents = pytest.importorskip("agents", reason="make test-integrations ONLY=clients installs openai-agents")

CALL = 'let me see <tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'
TOOL: Any = {"name": "double", "description": "Twice x", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = openai_policy.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    made._tokenizer.chat_template = "{{ tools }}" + made._tokenizer.chat_template
    return made


def calls_then_answers(known: Tokenizer) -> Policy:
    """A policy that calls the tool until it has seen its answer."""
    return Policy(lambda seen: (*known.encode("it is 42" if "42" in known.decode(seen) else CALL), IM_END))


@pytest.mark.parametrize("suffix", ["/v1", ""])
def test_anthropics_client_calls_tools(known: Tokenizer, suffix: str) -> None:
    policy = calls_then_answers(known)

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

    served(policy, known, client)
    one_conversation(policy, known)


def test_anthropics_client_streams_calls_and_gets_errors_as_its_own(known: Tokenizer) -> None:
    policy = calls_then_answers(known)

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

    served(policy, known, client)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_the_agents_sdk_runs_its_loop(known: Tokenizer, api: str, streamed: bool) -> None:
    import openai

    policy = calls_then_answers(known)
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

    served(policy, known, client)
    assert seen == [21]
    one_conversation(policy, known)
