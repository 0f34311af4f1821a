"""The intake bench: its stand-in's replies are read as an engine's, and a case goes from request to commit."""

from __future__ import annotations

import msgspec
import pytest

from asyncmoe.engines.decode import routed_experts
from asyncmoe.engines.sglang.answer import answer, packed_answer, response
from asyncmoe.engines.sglang.generation import request_body
from asyncmoe.engines.types import Sampling
from asyncmoe.platform.sglang.packed_answers import MEDIA_TYPE
from asyncmoe.trajectory import Recording
from benchmarks import intake
from benchmarks.intake_case import IntakeCase
from benchmarks.intake_server import VOCABULARY, reply_to
from benchmarks.routes import ROUTING


@pytest.mark.parametrize("routed", [0, 5])
def test_a_reply_fits_its_request(routed: int) -> None:
    recording = Recording(ROUTING, vocabulary=VOCABULARY)
    sampling = Sampling(1.0, 30, (), recording=recording)
    body = msgspec.json.encode(request_body(tuple(range(7)), sampling, "0", routed, None))
    for given in (answer(reply_to(body, 1)), packed_answer(reply_to(body, 1, MEDIA_TYPE))):
        made = response("e", given, recording)
        assert len(made.tokens) == 30
        assert routed_experts(made.routes, ROUTING, tokens=37, routed=routed, key="k").rows == 36 - routed


@pytest.mark.thorough  # what a bench measures has tests of its own
def test_cases_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "routes_256": (IntakeCase("rate", 8, new=16, count=8), 0.0),
        "paced_1x256": (IntakeCase("rate", 8, new=16, count=8, watched=False), 0.01),
        "paced_2x128": (IntakeCase("rate", 8, new=16, count=8, watched=False), 0.01),
        "agents_80": (IntakeCase("agents", 1, 8, 8, count=1, turns=3), 0.0),
        "queued_long": (IntakeCase("queued", 8, new=16), 0.0),
        "unfinished_long": (IntakeCase("unfinished", 8, new=16), 0.0),
    }
    monkeypatch.setattr(intake, "CASES", cases)
    monkeypatch.setattr(intake, "_ENGINES", 1)
    results = intake.run(rounds=1)
    assert results["routes_256"]["tokens_per_cpu_s"] > 0
    times = [results[name]["cpu_ms_per_trajectory"] for name in ("paced_2x128", "paced_1x256")]
    assert results["paced_2x128"]["to_one"] == pytest.approx(times[0] / times[1], abs=1e-3)
    said = intake.table(results)
    for figure in (
        f"two processes: {results['paced_2x128']['to_one']:.2f}",
        f"{results['routes_256']['tokens_per_cpu_s']:,}",
        f"{results['agents_80']['last_to_first']:.2f}",
    ):
        assert figure in said
