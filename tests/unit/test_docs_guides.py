"""The examples in docs/guides do what the pages say."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from asyncmoe.config import parse
from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds
from asyncmoe.rollout.episodes.environments import load
from asyncmoe.rollout.episodes.episode import RolloutContext, Teaching
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring import Sample, Score, loading
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit import doc_pages
from tests.unit.test_environment_tools import Scripted

GUIDES = ("reward", "environment", "objective", "model-family", "samples", "task")
QUESTION, ANSWER = "12+7=", "19"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory with the files of all guides, and a process started in it."""
    names = []
    for guide in GUIDES:
        for name, text in doc_pages.files(doc_pages.read(f"guides/{guide}.md")).items():
            (tmp_path / name).write_text(text)
            names.append(name.removesuffix(".py"))
    assert len(names) == len(set(names)) == 11
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(doc_pages.ROOT))))
    yield tmp_path
    for name in names:
        sys.modules.pop(name, None)


def test_rewards_are_those_of_the_page(here: Path) -> None:
    rows = next(table for table in doc_pages.tables(doc_pages.read("guides/reward.md")) if table[0][0].startswith("`my_rewards:"))
    assert {row[0] for row in rows} == {f"`my_rewards:{name}`" for name in ("close", "Brief", "asked", "lines", "parts")}

    async def worth(target: str, responses: list[str]) -> list[Score]:
        section = ScoringSection(scorer=target, timeout_s=20.0, step_separator="\n" if target.endswith(":lines") else None, concurrency=1)
        made = loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: "".join(map(chr, tokens)))
        try:
            tokens = [tuple(map(ord, QUESTION + response)) for response in responses]
            sampled = [tuple(i >= len(QUESTION) for i in range(len(one))) for one in tokens]
            samples = [Sample(QUESTION, *rest) for rest in zip(responses, [ANSWER] * len(responses), tokens, sampled, strict=True)]
            return [await made.score(sample) for sample in samples]
        finally:
            await made.close()

    for target in {row[0] for row in rows}:
        mine = [(response, expected) for name, response, expected in rows if name == target]
        # A Markdown code span keeps blanks but not line ends.
        found = asyncio.run(worth(target.strip("`"), [response.strip("`").replace("\\n", "\n") for response, _ in mine]))
        for score, (response, expected) in zip(found, mine, strict=True):
            reward, _, steps = expected.partition(", steps ")
            assert score.reward == pytest.approx(float(reward), abs=1e-4), (target, response)
            told = [] if score.rewards is None else score.rewards[~np.isnan(score.rewards)].tolist()
            assert told == [float(step) for step in steps.split()], (target, response)


def test_a_judge_behind_http_is_whole(here: Path) -> None:
    import judge_server  # type: ignore[import-not-found]  # a file of the guide

    async def ask(server: Any) -> list[float]:
        section = ScoringSection(scorer=f"http://127.0.0.1:{server.server_address[1]}/score")
        made = loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: "")
        try:
            return [(await made.score(Sample(QUESTION, response, ANSWER, (1,), (True,)))).reward for response in ("19", "18")]
        finally:
            await made.close()

    with judge_server.ThreadingHTTPServer(("127.0.0.1", 0), judge_server.Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert asyncio.run(ask(server)) == [1.0, 0.0]
        server.shutdown()


def test_an_environment_plays_as_the_page_says(here: Path, known: Tokenizer) -> None:
    page = doc_pages.read("guides/environment.md")
    block = doc_pages.blocks(page, "yaml")[0]
    config = parse(yaml.safe_load(block.text))
    environment = load(config)
    rows = next(table for table in doc_pages.tables(page) if table[0][0] == "`19`")
    assert len(rows) == 3
    for says, reward, text in rows:
        texts = [part.strip("` ") for part in says.split(",")]
        pool: Any = Scripted(known, *texts)
        stage = RolloutContext(pool, Sampling(1.0, 16, (known.eos,)), known, Exact(), environment, seed=3)
        (made,) = asyncio.run(episode.run(stage, Prompt(QUESTION, known.encode(QUESTION), ANSWER), EpisodeId(0, 0, 0)))
        assert not pool.lines
        assert made.reward == float(reward)
        assert known.decode(made.tokens.tolist()) == text.strip("`")
        assert known.decode(made.tokens[made.loss_mask].tolist()) == "".join(texts)
    teaching = Teaching(environment, known, Bounds(), 0)
    shown = [asyncio.run(teaching.episode(i, Prompt(QUESTION, known.encode(QUESTION), ANSWER)))[0] for i in range(20)]
    said = [known.decode(one.tokens[one.loss_mask].tolist()) for one in shown]
    assert all(text.endswith(ANSWER) for text in said)
    assert len(set(said)) > 2, "the teacher is sometimes wrong at first"


@pytest.mark.parametrize(("guide", "script"), [("model-family", "try_my_moe.py"), ("objective", "try_my_objective.py")])
def test_a_script_says_what_the_page_says(here: Path, guide: str, script: str) -> None:
    made = subprocess.run([sys.executable, script], cwd=here, capture_output=True, text=True, timeout=60, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    (block,) = doc_pages.blocks(doc_pages.read(f"guides/{guide}.md"), "output")
    assert made.stdout == block.text
