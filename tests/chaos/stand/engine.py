"""An engine that keeps SGLang's HTTP protocol: `python -m tests.chaos.stand.engine ARGUMENTS_OF_SGLANG`.

It samples random tokens, one every few milliseconds, whose log-probabilities tell of its weights (`weights`). A receiver thread fetches
versions from the trainer's ranks (`exchange`), as those of the real engine do. What it may never be asked, and never do, it writes to
`CHAOS_FOLDER/wrong-ENGINE.jsonl`; what it does, to `engine-ENGINE.jsonl`. `CHAOS_FOLDER/network-ENGINE.json` makes its network a bad one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import sys
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from asyncmoe.platform.sglang.lifetime import API_KEY, end_with_parent
from asyncmoe.platform.sglang.receiver_command import CommitCommand, JoinCommand, parse
from tests.chaos.stand import weights
from tests.chaos.stand.exchange import Receiver

FOLDER = "CHAOS_FOLDER"
TOKEN_S = 0.004
_TOKENS = range(6, 262)
_STOP_SHARE = 0.01


class Network:
    """Network faults of this engine: {"until": monotonic time, "drop": share of answers cut off, "delay_s": ..., "half": ...}."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._random, self._read, self._now = path, random.Random(seed), 0.0, {}

    def now(self) -> dict[str, float]:
        if time.monotonic() - self._read > 0.05:
            self._read = time.monotonic()
            try:
                self._now = json.loads(self._path.read_text())
            except (OSError, ValueError):
                self._now = {}
        return self._now if self._now.get("until", 0.0) > time.monotonic() else {}

    def hits(self, share: float) -> bool:
        return self._random.random() < share


class Server:
    """The state of one engine."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name, self._random = name, random.Random(seed)
        self.parts, self.version = list(weights.FIRST), "0"
        self.paused, self.updating, self.swapping, self.mixed = False, False, False, False
        self.network = Network(folder / f"network-{name}.json", seed)
        self._said = (folder / f"engine-{name}.jsonl").open("a", buffering=1)
        self._wrongs = (folder / f"wrong-{name}.jsonl").open("a", buffering=1)
        self._receiver: Receiver | None = None
        self._aborted = 0
        self.say("started")

    def say(self, what: str, **more: Any) -> None:
        self._said.write(json.dumps({"what": what, "time": time.monotonic(), "pid": os.getpid(), **more}) + "\n")

    def wrong(self, what: str) -> None:
        self._wrongs.write(json.dumps({"what": what, "pid": os.getpid()}) + "\n")

    # ------------------------------------------------------------ sampling

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sample one response; the number of requests at once does not change its speed."""
        given, most = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        stops = body["sampling_params"].get("stop_token_ids") or []
        sampler, tokens, entries, versions = weights.Sampler(given), list[int](), list[Any](), list[str]()
        aborted, finish, whole = self._aborted, "length", False
        try:
            while len(tokens) < most:
                await asyncio.sleep(TOKEN_S)
                if aborted != self._aborted:
                    finish = "abort"
                    break
                if self.paused or self.swapping:
                    continue
                if self.mixed:
                    self.wrong("sampled with parts of two versions")
                token = self._random.choice(stops) if stops and self._random.random() < _STOP_SHARE else self._random.choice(_TOKENS)
                entries.append([sampler.take(token, self.parts), token, None])
                tokens.append(token)
                versions.append(self.version)
                if token in stops:
                    finish = "stop"
                    break
            whole = True
        finally:
            self.say("response" if whole else "cut", tokens=len(tokens))
        meta = {"finish_reason": {"type": finish}, "output_token_logprobs": entries, "weight_versions": spans(versions)}
        return {"output_ids": tokens, "meta_info": {**meta, "output_token_logprobs_length": len(tokens), "cached_tokens": 0}}

    # ------------------------------------------------------------ weights

    async def pause(self, body: dict[str, Any]) -> None:
        self.paused = True

    async def resume(self, body: dict[str, Any]) -> None:
        if self.updating or self.mixed:
            self.wrong("resumed in an update")
        self.paused = False

    async def begin(self, body: dict[str, Any]) -> None:
        if not self.paused:
            self.wrong("updated while it samples")
        self.updating = True

    async def end(self, body: dict[str, Any]) -> None:
        self.updating = False

    async def command(self, body: dict[str, Any]) -> None:
        """Start the receiver, or swap in what it has staged, one part after the other; outside an update between two tokens."""
        self.swapping = not self.updating
        try:
            await self._obey(body)
        finally:
            self.swapping = False

    async def _obey(self, body: dict[str, Any]) -> None:
        (text, _), *_ = pickle.loads(b64decode(body["serialized_named_tensors"][0]))  # noqa: S301  the controller's, who has the key
        match parse(text):
            case JoinCommand() as join:
                if self._receiver is not None:
                    self._receiver.close()
                self._receiver = await asyncio.to_thread(Receiver, join, self.say)
            case CommitCommand() as commit:
                staged = None if self._receiver is None else self._receiver.staged
                if staged is None or (staged.update, staged.version) != (commit.update, commit.version):
                    self.wrong(f"was to commit {commit}, and has staged {staged}")
                    raise web.HTTPBadRequest(text="nothing staged")
                self.say("commit", version=commit.version)
                self.mixed = True
                for index, part in enumerate(staged.parts):
                    self.parts[index] = part
                    await asyncio.sleep(0.01)
                self.mixed, self.version = False, body["weight_version"]
                self.say("serves", version=commit.version)

    async def set_version(self, body: dict[str, Any]) -> None:
        self.version = body["new_version"]

    async def abort(self, body: dict[str, Any]) -> None:
        self._aborted += 1

    async def nothing(self, body: dict[str, Any]) -> None:
        pass


def spans(versions: list[str]) -> list[dict[str, Any]]:
    """Return runs of equal versions as SGLang reports them."""
    found: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if found and found[-1]["version"] == version:
            found[-1]["end"] = at + 1
        else:
            found.append({"version": version, "start": at, "end": at + 1})
    return found or [{"version": "0", "start": 0, "end": 0}]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(server: Server, key: str) -> web.Application:
    """Return the server's routes."""

    async def obey(request: web.Request) -> web.Response:
        body = await request.read()
        # As in SGLang, a disconnected client ends the response, but not the request.
        await asyncio.shield(commands[request.path](json.loads(body) if body else {}))
        return web.json_response({"success": True, "message": ""})

    async def ready(request: web.Request) -> web.Response:
        return web.json_response({"device": "cpu"})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": server.version})

    async def healthy(request: web.Request) -> web.Response:
        while server.paused:
            await asyncio.sleep(TOKEN_S)
        return web.json_response({})

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(await server.generate(await request.json()))

    async def checksums(request: web.Request) -> web.Response:
        held = {f"part.{index}": part for index, part in enumerate(server.parts)}
        return web.json_response({"ranks": [{"checksums": held, "parallelism_info": [{"tp_rank": 0}]}]})

    commands = {
        "/pause_generation": server.pause,
        "/continue_generation": server.resume,
        "/begin_weight_update": server.begin,
        "/end_weight_update": server.end,
        "/update_weights_from_tensor": server.command,
        "/update_weight_version": server.set_version,
        "/abort_request": server.abort,
        "/flush_cache": server.nothing,
        "/freeze_gc": server.nothing,
    }
    made = web.Application(middlewares=[_bad_network(server, key)], client_max_size=64 << 20)
    made.router.add_get("/ping", ready)
    made.router.add_get("/server_info", ready)
    made.router.add_get("/model_info", info)
    made.router.add_get("/health_generate", healthy)
    made.router.add_post("/generate", generate)
    made.router.add_post("/weights_checker", checksums)
    for path in commands:
        made.router.add_post(path, obey)
    return made


def _bad_network(server: Server, key: str) -> Any:
    """Return middleware that checks the key, delays responses, and cuts them off at or after their beginning."""

    @web.middleware
    async def between(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            server.wrong(f"{request.path} without the key")
            raise web.HTTPUnauthorized
        does = server.network.now()
        if does.get("delay_s"):
            await asyncio.sleep(does["delay_s"])
        answer = await handler(request)
        transport = request.transport
        if transport is not None and server.network.hits(does.get("drop", 0.0)):
            transport.abort()
        elif transport is not None and server.network.hits(does.get("half", 0.0)):
            transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4096\r\n\r\n{")
            await asyncio.sleep(0.05)
            transport.close()
        return answer

    return between


def main() -> None:
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--random-seed", type=int)
    asked, _ = parser.parse_known_args(sys.argv[1:])
    server = Server(str(asked.random_seed), asked.random_seed, Path(os.environ[FOLDER]))
    # A disconnected client cancels a generation, as in SGLang.
    web.run_app(
        application(server, os.environ.get(API_KEY, "")),
        host=asked.host,
        port=asked.port,
        print=None,
        access_log=None,
        handler_cancellation=True,
        reuse_address=True,
    )


if __name__ == "__main__":
    main()
