"""Records the traffic between a real client and the endpoint, and counts what its conversations cost.

The oracle is the traffic itself, as JSON values: a request continues an earlier one if its messages begin with the earlier request's
messages and the answer that the client got to it. The endpoint knows nothing of this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit.openai_policy import IM_END, Policy

_VOLATILE = frozenset({"status", "annotations", "logprobs", "cache_control", "phase", "refusal", "index"})
_HOP = frozenset({"host", "content-length", "transfer-encoding", "content-encoding", "connection"})
_NUMBER = re.compile(r"#(\d+) ")


@dataclass
class Exchange:
    """A request and its answer.

    Attributes:
        asked: the request's messages or items.
        told: the answer's.
        number: which of the policy's responses it is; None: an error.
    """

    path: str
    status: int
    asked: list[str]
    told: list[str]
    number: int | None
    error: str = ""


@dataclass
class Counts:
    """What the conversations of one client cost.

    Attributes:
        requests, refused: requests for a response; those answered with an error.
        responses, tokens: of the policy.
        continuing: requests that only extend an answered one.
        false_forks: those of them that were not answered in its conversation.
        retokenised: responses whose text they gave to the policy again as text.
        rewritten: responses that the client sent again in a conversation whose beginning it had changed.
        lost_tokens: sampled tokens that no trajectory has.
        conversations: trajectories.
        calls: answers with tool calls; of the Responses API, calls.
    """

    requests: int = 0
    refused: int = 0
    responses: int = 0
    tokens: int = 0
    continuing: int = 0
    false_forks: int = 0
    retokenised: int = 0
    rewritten: int = 0
    lost_tokens: int = 0
    conversations: int = 0
    calls: int = 0
    errors: list[str] = field(default_factory=list)


class Script:
    """A policy that answers step by step: the step of a conversation follows from what the policy sees of it.

    Each response begins with its number ("#7 "), by which it is found again in the traffic.
    """

    def __init__(self, known: Tokenizer, steps: Sequence[str]) -> None:
        self._known, self._steps, self._said = known, steps, 0
        self.policy = Policy(self._say)

    def _say(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        done = len(set(_NUMBER.findall(self._known.decode(seen))))
        self._said += 1
        return (*self._known.encode(f"#{self._said} {self._steps[min(done, len(self._steps) - 1)]}"), IM_END)


class Recorder:
    """A proxy before the endpoint.

    Attributes:
        exchanges: requests for responses, in order of their answers.
        url: its base URL.
    """

    def __init__(self, url: str) -> None:
        self._to, self.exchanges = url, list[Exchange]()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Recorder:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        self._client = aiohttp.ClientSession(auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body, path = await request.read(), request.match_info["path"].removeprefix("v1/")
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP}
        async with self._client.request(request.method, f"{self._to}/{path}", params=request.query, data=body, headers=headers) as answer:
            told = await answer.read()
            if request.method == "POST" and not path.endswith("count_tokens"):
                self.exchanges.append(_exchange(path, answer.status, body, told))
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP}
            return web.Response(status=answer.status, headers=kept, body=told)

    def counts(self, policy: Policy, episode: Episode, known: Tokenizer) -> Counts:
        """Count. Every response of the policy begins with its number, see `Script`."""
        by_number = {_number(known.decode(said)): name for name, _, said in policy.asked}
        given = {_number(known.decode(said)): set(_NUMBER.findall(known.decode(tokens))) for _, tokens, said in policy.asked}
        sampled = sum(len(said) for _, _, said in policy.asked)
        kept = sum(sum(agent.sampled) for agent in episode.agents.values())
        made = Counts(
            requests=len(self.exchanges),
            refused=sum(one.status >= 400 for one in self.exchanges),
            responses=len(policy.asked),
            tokens=sampled,
            lost_tokens=sampled - kept,
            conversations=len(episode.agents),
            calls=sum("arguments" in told or "tool_use" in told for one in self.exchanges for told in one.told),
            errors=sorted({one.error for one in self.exchanges if one.error}),
        )
        answered: list[Exchange] = []
        for one in self.exchanges:
            earlier = max((other for other in answered if _continues(one, other)), key=lambda other: len(other.asked), default=None)
            if one.number is not None:
                if earlier is None:
                    made.rewritten += len(given[one.number])
                else:
                    made.continuing += 1
                    made.false_forks += by_number[one.number] != by_number[earlier.number]
                    made.retokenised += len(given[one.number])
                answered.append(one)
        return made


def as_record(counts: Counts) -> dict[str, Any]:
    """Return counts for a file of results."""
    return asdict(counts)


def _continues(one: Exchange, other: Exchange) -> bool:
    before = [*other.asked, *other.told]
    return len(one.asked) > len(before) and one.asked[: len(before)] == before


def _number(text: str) -> int:
    found = _NUMBER.match(text)
    assert found is not None, text
    return int(found[1])


def _exchange(path: str, status: int, body: bytes, told: bytes) -> Exchange:
    request = json.loads(body)
    first = [{"system": request[name]} for name in ("system", "instructions") if request.get(name)]
    asked = [_plain(item) for item in (*first, *_listed(request.get("input", request.get("messages"))))]
    if status >= 400:
        return Exchange(path, status, asked, [], None, f"{status} {told.decode()[:300]}")
    items = _answer(path, [json.loads(line) for line in _data(told)])
    plain = [_plain(item) for item in items]
    number = _NUMBER.search(json.dumps(items))
    return Exchange(path, status, asked, plain, int(number[1]) if number else None)


def _listed(messages: Any) -> list[Any]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _data(told: bytes) -> Iterable[str]:
    text = told.decode()
    if not text.startswith(("data:", "event:")):
        return [text]
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]


def _answer(path: str, events: list[Any]) -> list[Any]:
    """Return the items or the message of an answer, whole or streamed."""
    if path.endswith("responses"):
        return list(events[-1].get("response", events[-1])["output"])
    if path.endswith("chat/completions"):
        return [events[0]["choices"][0]["message"] if "message" in events[0]["choices"][0] else _chat(events)]
    return [_message(events)]


def _chat(events: list[Any]) -> dict[str, Any]:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}


def _message(events: list[Any]) -> dict[str, Any]:
    if "content" in events[0]:
        return {"role": "assistant", "content": events[0]["content"]}
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "input": ""})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[-1]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            blocks[-1]["input"] += event["delta"]["partial_json"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"], parse_float=_float)
    return {"role": "assistant", "content": blocks}


def _plain(item: Any) -> str:
    """Return an item as text that is equal for equal meaning: without what servers add, and with texts of one part as text."""
    plain = _cleaned(item)
    if isinstance(plain, dict) and plain.get("type", "message") in ("message", "function_call", "reasoning"):
        plain.pop("id", None)
        plain.setdefault("type", "message")
    return json.dumps(plain, sort_keys=True)


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _cleaned(part) for key, part in value.items() if key not in _VOLATILE and part not in (None, [], "")}
        if isinstance(kept.get("arguments"), str):
            kept["arguments"] = json.dumps(json.loads(kept["arguments"], parse_float=_float), sort_keys=True)
        return kept
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], dict) and isinstance(value[0].get("text"), str):
            return value[0]["text"]
        return [_cleaned(part) for part in value]
    return value


def _float(text: str) -> float | int:
    """Return 1.0 as 1: a client of JavaScript knows no difference."""
    return int(float(text)) if float(text).is_integer() else float(text)
