"""HTTP client of one SGLang 0.5.23 server.

Every method calls one endpoint of `sglang.srt.entrypoints.http_server`, waits a bounded time, and either succeeds or raises.
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
"""The client closes idle connections long before the engine would, because a request sent just as the engine closes is lost."""
ABORTED = "abort"
"""`Generation.finish` of a response that `EngineClient.abort` ended."""


class EngineLost(EngineError):
    """The engine did not answer: its process or the connection to it is gone."""


@dataclass(frozen=True)
class Sampling:
    """How a response is sampled, and which data is recorded with it.

    There is no seed per request: SGLang honors `sampling_seed` only with --enable-deterministic-inference
    (`sampling_batch_info.py`), which CPU and many GPU backends lack. Each engine is seeded as a whole instead, so a response
    depends on how requests were batched.

    Attributes:
        temperature: divides the logits; > 0.
        max_new_tokens: maximum length of the response, which then ends with finish "length".
        stop: token ids that end a response, in addition to those of the model's generation_config.json; the stop token is part of the
            response. Empty: only its length ends it.
        top_p, top_k, min_p: as in `RolloutSection`; by default, tokens are drawn from the whole vocabulary.
        recording: additional data that the engine reports.
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
    """An adapter in the form engines receive it (`asyncmoe.rollout.engines.adapters.message`).

    Attributes:
        config: result of `asyncmoe.models.lora.adapter.served_config`.
        tensors: one entry per tensor-parallel rank, each with all tensors.
    """

    config: Mapping[str, Any]
    tensors: tuple[str, ...]


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end` (exclusive) were sampled with weights `version`, the engine's version string at that time."""

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
    """The part of `/server_info` used here (sglang 0.5.23, srt/entrypoints/http_server.py `server_info`)."""

    device: str


class _Checked(msgspec.Struct, frozen=True):
    ranks: list[_CheckedRank]


@dataclass(frozen=True)
class Generation:
    """One response.

    Attributes:
        tokens: R sampled token ids, including the stop token if `finish` is "stop".
        logprobs: R natural log-probabilities: softmax of logits / temperature over the ids of the sampling mask if masks are recorded,
            else over the whole vocabulary.
        spans: the version that sampled each range of tokens; cover 0 to R without a gap.
        finish: "stop", "length", or `ABORTED` if `abort` ended it; an aborted response may have no tokens.
        cached_tokens: number of prompt tokens whose keys and values came from the prefix cache.
        routes, masks: as the engine reports them (`asyncmoe.rollout.engines.decode`), if requested.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: str
    cached_tokens: int
    routes: str | None = None
    masks: Sequence[Sequence[int]] | None = None


class EngineClient:
    """Client of one engine's endpoints.

    Args:
        name: name of the engine in errors.
        url: "http://host:port".
        key: API key the engine requires; empty: none.
        timeout_s: limit on every call without a timeout of its own.
    """

    def __init__(self, name: str, url: str, key: str = "", timeout_s: float = 60.0) -> None:
        self.name, self.url, self._timeout_s = name, url, timeout_s
        self._device = ""  # cached by `device`
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The engine queues requests it cannot run yet, so a limit on connections would only hide requests from it.
        self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))

    async def close(self) -> None:
        """Close the connections; the engine cancels the requests in flight."""
        await self._session.close()

    async def ready(self) -> bool:
        """Return True if the engine accepts requests; False also while nothing listens yet."""
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
            salt: cached prefixes are shared only between requests with the same salt.
            held: number of leading tokens whose routes are omitted, because earlier turns have them.
            adapter: name of a loaded adapter; None: the model without an adapter.

        Raises:
            EngineLost: the connection failed.
            EngineError: the engine refused or itself aborted the request, or its answer is malformed.
            WaitTimeout: no answer within `timeout_s`.
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
                # Always sent, because a model's generation_config.json can change the server's defaults.
                "top_p": sampling.top_p,
                "top_k": -1 if sampling.top_k is None else sampling.top_k,
                "min_p": sampling.min_p,
                "skip_special_tokens": False,
            },
        }
        return self._generation(await self._post("/generate", body, Generated, timeout_s), recording)

    async def pause(self, retract: bool = False) -> None:
        """Pause between two forward passes; running requests stay, and keep their keys and values unless `retract`."""
        await self._post("/pause_generation", {"mode": "retract" if retract else "in_place"}, _Acknowledged)

    async def flush(self) -> None:
        """Drop all cached prefixes; requires an engine without running requests (retracted requests wait)."""
        await self._send("/flush_cache", {}, self._timeout_s)

    async def abort(self) -> None:
        """End all requests; the engine answers each with the tokens sampled so far."""
        await self._send("/abort_request", {"rid": "", "abort_all": True}, self._timeout_s)

    async def go_on(self) -> None:
        """Resume after `pause`."""
        await self._post("/continue_generation", {"torch_empty_cache": False}, _Acknowledged)

    async def join(self, host: str, port: int, rank_offset: int, world: int, group: str, backend: str, timeout_s: float) -> None:
        """Have the engine's ranks join a process group; returns when all `world` ranks have joined."""
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
        """Receive one flattened bucket from rank 0 of `group` and load it; returns when the bucket is loaded."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            # Paused requests keep their keys and values; the salt separates the prefixes of other prompts by version.
            "flush_cache": False,
        }
        await self._post("/update_weights_from_distributed", body, _Acknowledged, timeout_s)

    async def tell(self, commands: Sequence[Command], timeout_s: float, version: int | None = None) -> None:
        """Give each rank's receiver its command, between `begin` and `end`.

        Args:
            version: version of the weights from then on; None: unchanged.
        """
        body = {
            "serialized_named_tensors": [payload(command) for command in commands],
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": None if version is None else str(version),
        }
        await self._post("/update_weights_from_tensor", body, _Acknowledged, timeout_s)

    async def load_adapter(self, name: str, adapter: Path | AdapterMessage, timeout_s: float, pinned: bool = False) -> None:
        """Load an adapter on every tensor-parallel rank, for requests that name it. The engine generates nothing meanwhile.

        Args:
            name: a name that no loaded adapter has.
            adapter: the adapter to send; or a folder that the engine can also read, and maps. The folder's files must not change, and are
                best deleted once loaded: SGLang silently reloads them for a request that names the adapter after `unload_adapter`.
            pinned: once used, the adapter keeps its place in adapter memory, whichever other adapters are requested.
        """
        named: dict[str, Any] = {"lora_name": name, "pinned": pinned}
        if isinstance(adapter, Path):
            await self._post("/load_lora_adapter", {**named, "lora_path": str(adapter)}, _Acknowledged, timeout_s)
            return
        body = {**named, "config_dict": dict(adapter.config), "serialized_named_tensors": list(adapter.tensors)}
        await self._post("/load_lora_adapter_from_tensors", body, _Acknowledged, timeout_s)

    async def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Unload an adapter. The engine answers, and loads another adapter, only when no request that names this one is left."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, _Acknowledged, timeout_s)

    async def end(self) -> None:
        """Close the weight update."""
        await self._post("/end_weight_update", {}, _Acknowledged)

    async def set_version(self, version: int) -> None:
        """Set the version of the weights from the next sampled token on."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, _Acknowledged)

    async def checksums(self, timeout_s: float) -> tuple[dict[str, str], ...]:
        """Return {SGLang parameter or buffer: checksum} for each tensor-parallel rank."""
        checked = await self._post("/weights_checker", {"action": "checksum"}, _Checked, timeout_s)
        return tuple(rank.checksums for rank in checked.ranks)

    async def device(self) -> str:
        """Return the type of device it computes on: "cpu", "cuda"."""
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
            raise EngineError(f"{self.name}: log-probabilities do not match the response's {len(tokens)} tokens")
        ends = [span.end for span in meta.weight_versions]
        if [span.start for span in meta.weight_versions] != [0, *ends[:-1]] or ends[-1:] != [len(tokens)]:
            raise EngineError(f"{self.name}: version spans {meta.weight_versions} do not cover {len(tokens)} tokens")
        values = tuple(value for value in logprobs if value is not None)
        if recording.masks:
            values = tuple(meta.output_token_sampling_logprobs or ())
            if len(values) != len(tokens):
                raise EngineError(f"{self.name}: got {len(values)} log-probabilities over sampling masks, expected {len(tokens)}")
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
        """POST a body, or GET without one; return the answer's body."""
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
    """Return the error message in an answer: {"error": {"message": ...}}, {"message": ...}, {"error_message": ...} or plain text."""
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text.decode(errors="replace").strip()[:500]
    if isinstance(answer, dict):
        inner = answer.get("error")
        answer = inner.get("message", answer) if isinstance(inner, dict) else answer.get("message", answer.get("error_message", answer))
    return str(answer)[:500]
