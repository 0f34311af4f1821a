"""Another engine than SGLang: nothing but one module knows which it is, and one that is not SGLang answers an episode's requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncmoe.engines.engine import EngineHandle
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import Sampling
from asyncmoe.errors import EngineError
from asyncmoe.rollout.episodes.interruption import respond
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.trajectory import NOTHING, Trajectory
from tests.unit.doc_pages import ROOT
from tests.unit.fake_engine import fake, handles
from tests.unit.test_docs_floors import imported, modules

SGLANG = "asyncmoe.engines.sglang"
SAMPLING = Sampling(1.0, 6, ())


def importers(files: dict[str, Path]) -> set[str]:
    """Modules outside the SGLang engine that import it: at their top, inside functions, or for types only."""
    outside = {name: path for name, path in files.items() if path.suffix == ".py" and f"{name}.".startswith(f"{SGLANG}.") is False}
    return {name for name, path in outside.items() if any(f"{one}.".startswith(f"{SGLANG}.") for one in imported(path))}


def test_one_module_knows_which_engine_it_is() -> None:
    assert importers(modules()) == {"asyncmoe.engines.backend"}
    benchmarks = {path.stem: path for path in (ROOT / "benchmarks").glob("*.py")}
    assert importers(benchmarks) == {"intake_case"}, "it measures how long SGLang's answers take to read"


def ask(engines: list[EngineHandle], before: tuple[Turn, ...] = ()) -> tuple[Pool, Trajectory]:
    """A response through the pool, and the trajectory that it makes."""

    async def run() -> tuple[Pool, Trajectory]:
        pool = Pool(engines, 4, 5.0, lambda *_: None)
        turns = [
            *before,
            *await respond(pool, (7, 8), [t for turn in before for t in (*turn.given, *turn.generation.tokens)], SAMPLING, "in_place"),
        ]
        return pool, assemble(turns, EpisodeId(0, 0, 0), NOTHING, 1.0, {})

    return asyncio.run(run())


def test_an_engine_that_is_not_sglang_answers_an_episode() -> None:
    engines = handles(1)
    fake(engines[0]).version = 3
    pool, trajectory = ask(engines)
    assert trajectory.tokens.tolist() == [7, 8, *range(2, 8)]
    assert trajectory.loss_mask.tolist() == [False] * 2 + [True] * 6
    assert trajectory.versions[2:].tolist() == [3] * 6
    assert trajectory.finish == "length"
    assert (pool.generated_tokens, pool.members[0].in_flight) == (6, 0)


def test_one_that_is_gone_is_fenced() -> None:
    engines = handles(1)
    engines[0].kill()
    with pytest.raises(EngineError, match=r"no engine is left: engine\.0: killed"):
        ask(engines)
