"""An engine other than SGLang: only one module knows the implementation, and another engine serves an episode's requests."""

from __future__ import annotations

from pathlib import Path

from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes.interruption import respond
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, assemble
from asyncmoe.trajectory import NOTHING
from tests.unit.asynchronous import asynchronous
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


@asynchronous
async def test_an_engine_that_is_not_sglang_answers_an_episode() -> None:
    engines = handles(1)
    fake(engines[0]).version = 3
    pool = Pool(engines, 4, 5.0, lambda *_: None)
    trajectory = assemble(await respond(pool, (7, 8), [], SAMPLING, "in_place"), EpisodeId(0, 0, 0), NOTHING, 1.0, {})
    assert trajectory.tokens.tolist() == [7, 8, *range(2, 8)]
    assert trajectory.loss_mask.tolist() == [False] * 2 + [True] * 6
    assert trajectory.versions[2:].tolist() == [3] * 6
    assert trajectory.finish == "length"
    assert (pool.generated_tokens, pool.members[0].in_flight) == (6, 0)
