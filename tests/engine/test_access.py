"""A server that a run starts answers and changes nothing without its key: every route, health checks and web sockets included."""

from __future__ import annotations

import aiohttp
import pytest

from tests.engine.conftest import KEY, Rig

pytestmark = pytest.mark.engine


def test_no_route_answers_without_the_key(rig: Rig) -> None:
    url, at_limit = rig.engine.url, aiohttp.ClientTimeout(20)

    async def statuses() -> tuple[dict[str, int], list[str]]:
        found = {}
        async with aiohttp.ClientSession(timeout=at_limit) as session:
            async with session.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}) as reply:
                paths = (await reply.json())["paths"]
            for path, methods in paths.items():
                for method in [*methods, "options"]:
                    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}):
                        async with session.request(method, url + path, json={}, headers=headers) as reply:
                            found[f"{method} {path} {headers}"] = reply.status
            for path in ("/docs", "/metrics", "/nowhere"):
                async with session.get(url + path) as reply:
                    found[f"get {path}"] = reply.status
        return found, list(paths)

    found, paths = rig.run(statuses())
    assert {"/generate", "/health_generate", "/update_weights_from_disk", "/pause_generation"} <= set(paths)
    assert {where: status for where, status in found.items() if status != 401} == {}


def test_the_log_is_without_the_key(rig: Rig) -> None:
    (log,) = (rig.config.run.dir / "logs").glob("engine-0.log")
    assert "api_key" in (text := log.read_text())
    assert KEY not in text


def test_no_web_socket_opens_without_the_key(rig: Rig) -> None:
    async def opened() -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{rig.engine.url}/v1/realtime"):
            pass

    with pytest.raises(aiohttp.WSServerHandshakeError, match=r"401|403"):  # 401 where the server has no package for web sockets
        rig.run(opened())
