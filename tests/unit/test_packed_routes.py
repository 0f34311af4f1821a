"""Packing of routes in an engine's scheduler; tests/engine tests the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kept_trajectory import distinct

from asyncmoe.errors import ProtocolError
from asyncmoe.platform.sglang import packed_routes
from asyncmoe.platform.sglang.packed_routes import packed
from asyncmoe.trajectory import Routing, decode_routes
from asyncmoe.trajectory.sent_routes import from_bytes

ROUTING = Routing(4, (1, 3), 3, 200)


def rows(count: int) -> torch.Tensor:
    return torch.from_numpy(distinct(np.random.default_rng(count), count, 4, 3, 200))


@pytest.mark.parametrize("count", [0, 1, 37])
def test_packed_routes_are_a_tensor_of_bytes(count: int) -> None:
    sent = packed(rows(count), ROUTING)
    assert (sent.dtype, sent.dim()) == (torch.uint8, 1)
    got = decode_routes(from_bytes(sent.numpy().tobytes(), "t"), "t")
    np.testing.assert_array_equal(got, rows(count).numpy()[:, [1, 3]].transpose(1, 0, 2))


@pytest.mark.parametrize(
    "routes",
    [
        pytest.param(torch.full((5, 4, 3), -1, dtype=torch.int32), id="no experts"),
        pytest.param(torch.full((5, 4, 3), 7, dtype=torch.int32), id="an expert twice"),
        pytest.param(rows(5) + 200, id="experts of another model"),
        pytest.param(rows(5)[:, :3], id="layers of another model"),
        pytest.param(rows(5)[:, :, :2], id="fewer experts a token"),
        pytest.param(rows(5).long(), id="another type"),
    ],
)
def test_routes_that_do_not_fit_are_refused_with_the_reason(routes: torch.Tensor) -> None:
    with pytest.raises(ProtocolError, match=r"routes of t: got b.routes_"):
        from_bytes(packed(routes, ROUTING).numpy().tobytes(), "t")


def test_only_the_rank_that_answers_collects_and_packs() -> None:
    """SGLang's processors collect the routes of every finished response on every rank; one rank has a socket."""
    owner = SimpleNamespace(_maybe_collect_routed_experts=lambda _, request: setattr(request, "routed_experts", rows(5)))
    packed_routes._mend(cast(Any, SimpleNamespace(SchedulerBatchResultProcessor=owner)), ROUTING)
    got = []
    for socket in (None, object()):
        streamer, request = SimpleNamespace(send_to_detokenizer=SimpleNamespace(socket=socket)), SimpleNamespace(routed_experts=None)
        owner._maybe_collect_routed_experts(SimpleNamespace(output_streamer=streamer), request)
        got.append(request.routed_experts)
    assert got[0] is None
    assert torch.equal(got[1], packed(rows(5), ROUTING))


def test_bytes_that_begin_otherwise_are_no_routes() -> None:
    sent = packed(rows(2), ROUTING).numpy().tobytes()
    with pytest.raises(ProtocolError):
        from_bytes(b"amr2" + sent[4:], "t")
