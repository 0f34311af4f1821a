"""What `asyncmoe plan` says of updates, beside updates that were coded."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from asyncmoe.models import EngineParallel
from asyncmoe.plan import memory, render_plan, traffic
from asyncmoe.plan.memory import EngineMemory
from asyncmoe.plan.sizes import parse_engines, parse_trainer
from asyncmoe.plan.updates import coded_share, updates
from asyncmoe.reshard import Box, DeltaEncoder, Piece, RankLayout, Storage, plan
from benchmarks.published import FLOAT8, REAL

_COUNT = 4_000_000


@pytest.mark.parametrize("changed", [0.0005, 0.003, 0.01, 0.05])
@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)])
def test_a_coded_delta_is_as_large_as_said(changed: float, dtype: str, kind: type[np.unsignedinteger]) -> None:
    def layout(rank: int) -> RankLayout:
        return RankLayout(rank, {"w": Storage((_COUNT,), dtype)}, [Piece("w", Box((0,), (_COUNT,)), "w", 0, (1,))])

    sender = DeltaEncoder(plan({"w": (_COUNT,)}, [layout(0)], [layout(1)], ranks=[0]), 0)
    generator = np.random.default_rng(5)
    held = generator.integers(0, 100, _COUNT).astype(kind)
    sender.bind({"w": held})
    sender.full(1)
    held[generator.random(_COUNT) < changed] += 1
    size = sender.encode(2, limit_bytes=1 << 40)
    assert size is not None
    coded = sum(sender.sizes(1))
    noise = 4 / (changed * _COUNT) ** 0.5  # of how many elements changed
    assert coded / held.nbytes == pytest.approx(coded_share(changed, held.itemsize), rel=0.002 + noise)


def test_an_update_pauses_for_what_is_written_meanwhile() -> None:
    whole, small, large = updates(shard=10**10, bytes_wire=10**12, seconds=2.0, item=2, hbm=1000.0)
    assert (whole.bytes_wire, whole.seconds, whole.pause, whole.pause_in_place) == (10**12, 2.0, 0.02, 2.0)
    assert small.seconds < 0.02 * whole.seconds
    assert small.received == pytest.approx(small.seconds / 2.0 * 10**10)
    assert small.pause == small.pause_in_place < 0.01
    assert large.pause == large.pause_in_place < 0.03


@pytest.mark.parametrize(
    ("name", "trainer", "engines", "fits"),
    [
        ("Qwen3-235B-A22B", "tp=4,pp=8,ep=8,dp=8,first=11,last=11", "1xtp8ep8", {80: (False,), 141: (True, False)}),
        ("DeepSeek-V3", "tp=4,pp=8,ep=8,dp=8,first=5", "1xtp16ep16", {80: (False,)}),
    ],
)
def test_large_models_fit_as_their_weights_do(name: str, trainer: str, engines: str, fits: dict[int, tuple[bool, ...]]) -> None:
    hf = REAL[name] | ({"quantization_config": FLOAT8} if name == "DeepSeek-V3" else {})
    count, parallel = parse_engines(engines)
    found = traffic.foresee(name, hf, parse_trainer(trainer), parallel, count)
    assert found.updates[1].bytes_wire < 0.03 * found.updates[0].bytes_wire
    for gpu_gb, able in fits.items():
        rooms = {staged: memory.kv_room(hf, parallel, EngineMemory(0, staged), gpu_gb) for staged in (True, False)}
        assert tuple(staged for staged, tokens in rooms.items() if tokens >= 8192) == able, rooms


def test_bytes_of_a_float8_model_are_those_that_travel() -> None:
    hf = REAL["Moonlight-16B-A3B"]
    sizes = parse_trainer("tp=1"), EngineParallel(1)
    wide, small = (traffic.foresee("", one, *sizes, 1).model_bytes for one in (hf, hf | {"quantization_config": FLOAT8}))
    assert 0.5 < small / wide < 0.6


def test_an_engine_that_does_not_fit_is_named() -> None:
    console = Console(record=True, width=160)
    render_plan.show_room(100, False, 8192, console)
    render_plan.show_room(9000, False, 8192, console)
    text = " ".join(console.export_text().split())
    assert "too few for a conversation of 8192 tokens: such an engine does not fit" in text
    assert "new weights arrive while engines are paused" in text
