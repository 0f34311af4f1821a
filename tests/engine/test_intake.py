"""A real engine packs its response, and the stand-in of `asyncmoe bench intake` responds in the same form."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from asyncmoe.engines.sglang.answer import packed_answer, response
from asyncmoe.engines.sglang.generation import request_body
from asyncmoe.engines.sglang.streaming import answer
from asyncmoe.engines.types import Sampling
from asyncmoe.models.make import VOCAB
from asyncmoe.platform.sglang.packed_answers import MEDIA_TYPE
from asyncmoe.trajectory import Recording, Routing
from asyncmoe.trajectory.sent_routes import MAGIC
from benchmarks.intake_server import reply_to
from tests.engine.conftest import ROUTING, Rig

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("masks", [False, True], ids=["without masks", "with masks"])
@pytest.mark.parametrize("routing", [None, ROUTING], ids=["without routes", "with routes"])
def test_a_real_engine_packs_its_answer(rig: Rig, routing: Routing | None, masks: bool) -> None:
    """Request the same response twice, greedily: packed, and as JSON."""
    client: Any = rig.engine.client
    recording = Recording(routing, masks=masks, vocabulary=VOCAB)
    body = request_body((20, 30, 40), Sampling(1.0, 6, (), top_k=1, recording=recording), f"packed {routing} {masks}", 0, None)

    async def packed() -> tuple[str, bytes]:
        async with client._requested("/generate", body, 60.0, MEDIA_TYPE) as reply:
            return reply.content_type, await reply.read()

    kind, content = rig.run(packed())
    assert kind == MEDIA_TYPE
    made = response("engine", packed_answer(content), recording)
    shown = response("engine", answer("engine", rig.run(client._send("/generate", body, 60.0))), recording)
    assert made.tokens.tolist() == shown.tokens.tolist()
    assert np.allclose(made.logprobs, shown.logprobs, atol=1e-4)
    assert (made.spans, made.finish) == (shown.spans, shown.finish)
    if routing is not None:
        assert bytes(made.routes) == shown.routes
        assert bytes(made.routes)[:4] == MAGIC
    if masks:
        assert made.masks.ids.tolist() == shown.masks.ids.tolist() == made.tokens.tolist()
    stand_in = packed_answer(reply_to(msgspec.json.encode(body), 0, MEDIA_TYPE))
    assert [len(part) for part in (stand_in.tokens, stand_in.logprobs)] == [len(part) for part in (made.tokens, made.logprobs)]
