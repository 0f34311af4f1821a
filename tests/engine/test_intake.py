"""The stand-in of `asyncmoe bench intake` answers as a real engine does: the same fields of the same kinds."""

from __future__ import annotations

import base64
import json
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
from tests.engine.conftest import Rig

pytestmark = pytest.mark.engine

ROUTING = Routing(all_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)


def form(value: Any) -> Any:
    """What a value is made of; of a list, each kind of element once."""
    if isinstance(value, dict):
        return {name: form(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(form(inner)) for inner in value})
    return type(value).__name__


@pytest.mark.parametrize("routing", [None, ROUTING], ids=["without routes", "with routes"])
def test_the_stand_in_answers_as_a_real_engine(rig: Rig, routing: Routing | None) -> None:
    client: Any = rig.engine.client
    recording = Recording(routing, vocabulary=VOCAB)
    body = request_body((20, 30, 40), Sampling(1.0, 6, (), recording=recording), f"intake {routing}", 0, None)
    real = rig.run(client._send("/generate", body, 60.0))
    shown = reply_to(msgspec.json.encode(body), 0)
    kinds = [form(json.loads(text)) for text in (real, shown)]
    assert kinds[0] == kinds[1]
    assert list(kinds[0]["meta_info"]) == list(kinds[1]["meta_info"]), "in the same order"
    for text in (real, shown):
        generation = response("engine", answer("engine", text), recording)
        assert len(generation.tokens) == len(generation.logprobs) == 6
        if routing is not None:
            assert base64.b64decode(json.loads(text)["meta_info"]["routed_experts"])[:4] == MAGIC
            assert generation.routes is not None


@pytest.mark.parametrize("masks", [False, True], ids=["without masks", "with masks"])
@pytest.mark.parametrize("routing", [None, ROUTING], ids=["without routes", "with routes"])
def test_a_real_engine_packs_its_answer(rig: Rig, routing: Routing | None, masks: bool) -> None:
    """The same answer twice, greedily: packed, and as JSON."""
    client: Any = rig.engine.client
    recording = Recording(routing, masks=masks, vocabulary=VOCAB)
    body = request_body((20, 30, 40), Sampling(1.0, 6, (), top_k=1, recording=recording), f"packed {routing} {masks}", 0, None)
    reply = rig.run(client._ask("/generate", body, 60.0, MEDIA_TYPE))
    assert reply.kind == MEDIA_TYPE
    made = response("engine", packed_answer(reply.body), recording)
    shown = response("engine", answer("engine", rig.run(client._send("/generate", body, 60.0))), recording)
    assert made.tokens.tolist() == shown.tokens.tolist()
    assert np.allclose(made.logprobs, shown.logprobs, atol=1e-4)
    assert (made.spans, made.finish) == (shown.spans, shown.finish)
    if routing is not None:
        assert made.routes is not None
        assert bytes(made.routes) == shown.routes
        assert bytes(made.routes)[:4] == MAGIC
    if masks:
        assert made.masks is not None
        assert shown.masks is not None
        assert made.masks.ids.tolist() == shown.masks.ids.tolist() == made.tokens.tolist()
    stand_in = packed_answer(reply_to(msgspec.json.encode(body), 0, MEDIA_TYPE))
    assert [len(part) for part in (stand_in.tokens, *stand_in.entries)] == [len(part) for part in (made.tokens, made.logprobs, made.tokens)]
