"""Talking to one SGLang 0.5.23 server over HTTP.

Every method is one endpoint of `sglang.srt.entrypoints.http_server`, waits a bounded time, and either succeeds or raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from asyncmoe.errors import EngineError, WaitTimeout
from asyncmoe.receiver.command import LOADER, Command, payload
from asyncmoe.record import NOTHING, Recording

T = TypeVar("T")
KEEP_ALIVE_S = 5.0
"""An idle connection is closed by us long before the engine would: what is sent just when the other side closes is lost."""
ABORTED = "abort"
"""`Generation.finish` of a response that was cut short on request."""


class EngineLost(EngineError):
    """The engine did not answer at all: its process or the connection to it is gone."""


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn, and what is recorded of it.

    There is no seed per request: SGLang heeds `sampling_seed` only with --enable-deterministic-inference
    (`sampling_batch_info.py`), which CPU and many GPU backends lack. Each engine is seeded as a whole instead, so which
    response comes out depends on how requests were batched.

    Attributes:
        temperature: logits are divided by it; > 0.
        max_new_tokens: the response ends with finish "length" there.
        stop: token ids that end a response, with those of the model's generation_config.json; the one that does is part of the
            response. Empty: nothing but its length ends it.
        top_p, top_k, min_p: as in `RolloutSection`; with their defaults a token is drawn from the whole vocabulary.
        recording: what the engine reports besides.
    """

    temperature: float
    max_new_tokens: int
    stop: tuple[int, ...]
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    recording: Recording = NOTHING


@dataclass(frozen=True)
class AdapterMessage:
    """An adapter as it is sent (`asyncmoe.rollout.engines.adapters.message`).

    Attributes:
        config: `asyncmoe.models.lora.adapter.served_config`.
        tensors: for each tensor-parallel rank, all of them.
    """

    config: Mapping[str, Any]
    tensors: tuple[str, ...]


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end` (exclusive) were sampled by weights of `version`, the string last given to the engine."""

    version: str
    start: int
    end: int


class _Finish(msgspec.Struct, frozen=True):
    type: Literal["stop", "length", "abort"]
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int, str | None]]
    weight_versions: list[VersionSpan]
    cached_tokens: int = 0
    routed_experts: str | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class Generated(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: _Meta


class _Acknowledged(msgspec.Struct, frozen=True):
    success: bool = True
    message: str = ""


class _CheckedRank(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _ServerInfo(msgspec.Struct):
    """A part of `/server_info` (sglang 0.5.23, srt/entrypoints/http_server.py `server_info`)."""

    device: str


class _Checked(msgspec.Struct, frozen=True):
    ranks: list[_CheckedRank]


@dataclass(frozen=True)
class Generation:
    """One response.

    Attributes:
        tokens: sampled token ids, R of them; the stop token included when `finish` is "stop".
        logprobs: R natural logarithms, of the softmax of logits / temperature over the ids sampled from where masks are recorded, else
            over the whole vocabulary.
        spans: which version sampled which tokens; cover 0 to R without a gap.
        finish: "stop", "length" or `ABORTED`, when `abort` ended it; it may then have no tokens.
        cached_tokens: prompt tokens whose keys and values were taken from the prefix cache.
        routes, masks: as the engine reports them (`asyncmoe.rollout.engines.sglang_decode`), where it was asked to.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: str
    cached_tokens: int
    routes: str | None = None
    masks: Sequence[Sequence[int]] | None = None


class EngineClient:
    """One engine's endpoints.

    Args:
        name: what errors call it.
        url: "http://host:port".
        key: what the engine wants to be shown; empty: nothing.
        timeout_s: bound of every call that is not given its own.
    """

    def __init__(self, name: str, url: str, key: str = "", timeout_s: float = 60.0) -> None:
        self.name, self.url, self._timeout_s = name, url, timeout_s
        self._device = ""  # as it says, once it was asked
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The engine queues what it cannot run, so a bound on connections would only hide requests from it.
        self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))

    async def close(self) -> None:
        """Drop the connections; what is in flight is cancelled at the engine."""
        await self._session.close()

    async def ready(self) -> bool:
        """Whether it takes requests; False also while nothing listens yet."""
        try:
            async with self._session.get(f"{self.url}/ready", timeout=aiohttp.ClientTimeout(5.0)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, salt: str, timeout_s: float, held: int = 0, adapter: str | None = None
    ) -> Generation:
        """Sample one response to a prompt of token ids.

        Args:
            salt: prefixes are shared only between requests of the same salt.
            held: leading tokens whose routes need not be sent, because earlier turns have them.
            adapter: name of a loaded one; None: the model as it is.

        Raises:
            EngineLost, EngineError, WaitTimeout: see the class's module; also when the engine aborted the request.
        """
        recording = sampling.recording
        body = {
            "input_ids": list(tokens),
            "return_logprob": True,
            "return_sampling_mask": recording.masks,
            "return_routed_experts": recording.routing is not None,
            "routed_experts_start_len": held if recording.routing is not None else 0,
            "cache_salt": salt,
            "lora_path": adapter,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_new_tokens,
                "stop_token_ids": list(sampling.stop),
                "ignore_eos": not sampling.stop,
                # Said although they may be the server's defaults, which a model's generation_config.json can change.
                "top_p": sampling.top_p,
                "top_k": -1 if sampling.top_k is None else sampling.top_k,
                "min_p": sampling.min_p,
                "skip_special_tokens": False,
            },
        }
        return self._generation(await self._post("/generate", body, Generated, timeout_s), recording)

    async def pause(self, retract: bool = False) -> None:
        """Stop between two forward passes; running requests stay where they are, and their keys and values too, unless `retract`."""
        await self._post("/pause_generation", {"mode": "retract" if retract else "in_place"}, _Acknowledged)

    async def flush(self) -> None:
        """Forget all cached prefixes; needs an engine without running requests (those that were retracted wait)."""
        await self._send("/flush_cache", {}, self._timeout_s)

    async def abort(self) -> None:
        """End all requests; each is answered with what it has."""
        await self._send("/abort_request", {"rid": "", "abort_all": True}, self._timeout_s)

    async def go_on(self) -> None:
        """The inverse of `pause`."""
        await self._post("/continue_generation", {"torch_empty_cache": False}, _Acknowledged)

    async def join(self, host: str, port: int, rank_offset: int, world: int, group: str, backend: str, timeout_s: float) -> None:
        """Have the engine's ranks join a process group; returns when all `world` ranks have."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world,
            "group_name": group,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, _Acknowledged, timeout_s)

    async def begin(self) -> None:
        """Open a weight update; required before the first bucket."""
        await self._post("/begin_weight_update", {"selector": "all"}, _Acknowledged)

    async def bucket(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str, timeout_s: float
    ) -> None:
        """Receive one flattened bucket from rank 0 of `group` and load it; returns when it is loaded."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            # Paused requests keep their keys and values; other prompts are kept apart by their salt.
            "flush_cache": False,
        }
        await self._post("/update_weights_from_distributed", body, _Acknowledged, timeout_s)

    async def tell(self, commands: Sequence[Command], timeout_s: float, version: int | None = None) -> None:
        """Give each rank's receiver its command, between `begin` and `end`.

        Args:
            version: what the weights are called from then on; None: as before.
        """
        body = {
            "serialized_named_tensors": [payload(command) for command in commands],
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": None if version is None else str(version),
        }
        await self._post("/update_weights_from_tensor", body, _Acknowledged, timeout_s)

    async def load_adapter(self, name: str, adapter: Path | AdapterMessage, timeout_s: float, pinned: bool = False) -> None:
        """Have every tensor-parallel rank hold an adapter, for requests that name it. The engine generates nothing meanwhile.

        Args:
            name: of none that is loaded.
            adapter: to send; or a folder that the engine sees too, and maps. What is there must not change, and is best deleted as soon as
                it is loaded: SGLang loads it again, and says nothing, for a request that names it after `unload_adapter`.
            pinned: once used it stays where it is in adapter memory, whatever else is asked for.
        """
        named: dict[str, Any] = {"lora_name": name, "pinned": pinned}
        if isinstance(adapter, Path):
            await self._post("/load_lora_adapter", {**named, "lora_path": str(adapter)}, _Acknowledged, timeout_s)
            return
        body = {**named, "config_dict": dict(adapter.config), "serialized_named_tensors": list(adapter.tensors)}
        await self._post("/load_lora_adapter_from_tensors", body, _Acknowledged, timeout_s)

    async def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Forget an adapter. The engine answers, and loads another, only when no request that names it is left."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, _Acknowledged, timeout_s)

    async def end(self) -> None:
        """Close the weight update."""
        await self._post("/end_weight_update", {}, _Acknowledged)

    async def set_version(self, version: int) -> None:
        """Say what the weights are called from the next sampled token on."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, _Acknowledged)

    async def checksums(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        """For each tensor-parallel rank {SGLang parameter or buffer: checksum}."""
        checked = await self._post("/weights_checker", {"action": "checksum"}, _Checked, timeout_s)
        return tuple(rank.checksums for rank in checked.ranks)

    async def device(self) -> str:
        """What it computes on: "cpu", "cuda"."""
        if not self._device:
            text = await self._send("/server_info", None, self._timeout_s)
            try:
                self._device = msgspec.json.decode(text, type=_ServerInfo).device
            except msgspec.DecodeError as error:
                raise EngineError(f"{self.name}: /server_info: unexpected answer: {error}") from error
        return self._device

    def _generation(self, reply: Generated, recording: Recording) -> Generation:
        meta = reply.meta_info
        if meta.finish_reason.type == ABORTED and meta.finish_reason.status_code is not None:
            raise EngineError(f"{self.name}: the request was aborted: {meta.finish_reason.message}")
        tokens = tuple(reply.output_ids)
        logprobs = tuple(entry[0] for entry in meta.output_token_logprobs)
        if tuple(entry[1] for entry in meta.output_token_logprobs) != tokens or None in logprobs:
            raise EngineError(f"{self.name}: the log-probabilities are not those of the response's {len(tokens)} tokens")
        ends = [span.end for span in meta.weight_versions]
        if [span.start for span in meta.weight_versions] != [0, *ends[:-1]] or ends[-1:] != [len(tokens)]:
            raise EngineError(f"{self.name}: version spans {meta.weight_versions} do not cover {len(tokens)} tokens")
        values = tuple(value for value in logprobs if value is not None)
        if recording.masks:
            values = tuple(meta.output_token_sampling_logprobs or ())
            if len(values) != len(tokens):
                raise EngineError(f"{self.name}: got {len(values)} log-probabilities over supports, expected {len(tokens)}")
        return Generation(
            tokens,
            values,
            tuple(meta.weight_versions),
            meta.finish_reason.type,
            meta.cached_tokens,
            meta.routed_experts,
            meta.output_token_sampling_mask,
        )

    async def _post(self, path: str, body: Mapping[str, Any], kind: type[T], timeout_s: float | None = None) -> T:
        text = await self._send(path, body, timeout_s or self._timeout_s)
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name}: {path}: unexpected answer: {error}") from error

    async def _send(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
        """POST a body, or GET."""
        headers = {"Content-Type": "application/json"}
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=aiohttp.ClientTimeout(seconds)
            ) as reply:
                status, text = reply.status, await reply.read()
        except TimeoutError as error:
            raise WaitTimeout(self.name, path, seconds) from error
        except aiohttp.ClientError as error:
            raise EngineLost(f"{self.name}: {path}: {error or type(error).__name__}") from error
        if status != 200:
            raise EngineError(f"{self.name}: {path}: {_message(text)}")
        return text


def _message(text: bytes) -> str:
    """What the server says is wrong: {"error": {"message": ...}}, {"message": ...}, {"error_message": ...} or plain text."""
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text.decode(errors="replace").strip()[:500]
    if isinstance(answer, dict):
        inner = answer.get("error")
        answer = inner.get("message", answer) if isinstance(inner, dict) else answer.get("message", answer.get("error_message", answer))
    return str(answer)[:500]
