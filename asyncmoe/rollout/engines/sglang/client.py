"""HTTP client of one SGLang 0.5.23 server: `asyncmoe.rollout.engines.engine.Engine`, whose docstrings say what each call does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

from asyncmoe.errors import EngineError
from asyncmoe.rollout.engines.sglang.connection import Acknowledged
from asyncmoe.rollout.engines.sglang.generation import Generated, request_body, response
from asyncmoe.rollout.engines.sglang.weights import WeightEndpoints
from asyncmoe.rollout.engines.types import Generation, Sampling


class _ServerInfo(msgspec.Struct):
    """The part of `/server_info` used here (sglang 0.5.23, srt/entrypoints/http_server.py `server_info`)."""

    device: str


class SGLangClient(WeightEndpoints):
    """Client of one engine's endpoints; see `SGLangConnection` for its arguments."""

    _device = ""
    """Cached by `device`."""

    async def ready(self) -> bool:
        try:
            async with self._session.get(f"{self.url}/ready", timeout=aiohttp.ClientTimeout(5.0)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def device(self) -> str:
        if not self._device:
            text = await self._send("/server_info", None, self._timeout_s)
            try:
                self._device = msgspec.json.decode(text, type=_ServerInfo).device
            except msgspec.DecodeError as error:
                raise EngineError(f"{self.name}: /server_info: unexpected answer: {error}") from error
        return self._device

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, salt: str, timeout_s: float, routed: int = 0, adapter: str | None = None
    ) -> Generation:
        body = request_body(tokens, sampling, salt, routed, adapter)
        return response(self.name, await self._post("/generate", body, Generated, timeout_s), sampling.recording)

    async def abort(self) -> None:
        await self._send("/abort_request", {"rid": "", "abort_all": True}, self._timeout_s)

    async def load_adapter(self, name: str, folder: Path, timeout_s: float, pinned: bool = False) -> None:
        """SGLang generates nothing meanwhile. It silently reloads a folder for a request that names the adapter after `unload_adapter`.

        Args:
            pinned: once used, the adapter keeps its place in adapter memory, whichever other adapters are requested.
        """
        body = {"lora_name": name, "lora_path": str(folder), "pinned": pinned}
        await self._post("/load_lora_adapter", body, Acknowledged, timeout_s)

    async def unload_adapter(self, name: str, timeout_s: float) -> None:
        """SGLang answers, and loads another adapter, only when no request that names this one is left."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, Acknowledged, timeout_s)
