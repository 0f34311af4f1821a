"""The examples in docs/guides do what the pages say."""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from asyncmoe import models
from asyncmoe.config import parse
from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.types import Generation, Sampling, VersionSpan
from asyncmoe.errors import UserError
from asyncmoe.platform import collectives
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds, Environment
from asyncmoe.rollout.episodes.environments import load
from asyncmoe.rollout.episodes.episode import RolloutContext, Teaching
from asyncmoe.rollout.episodes.openai_endpoint.environment import OpenAIEnvironment
from asyncmoe.rollout.episodes.tools.loading import load as load_tools
from asyncmoe.rollout.episodes.tools.tool import ToolError
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring import Sample, Score, loading
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trainer import objective
from asyncmoe.trainer.objective import PolicyRows
from asyncmoe.trajectory import Trajectory
from tests.unit import doc_pages, openai_policy
from tests.unit.sampled_run import SampledRun

GUIDES = ("reward", "environment", "objective", "model-family", "samples")
QUESTION, ANSWER = "12+7=", "19"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return openai_policy.tokenizer(tmp_path_factory.mktemp("guides"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory with the files of all guides, and a process started in it."""
    names = []
    for guide in GUIDES:
        for name, text in doc_pages.files(doc_pages.read(f"guides/{guide}.md")).items():
            (tmp_path / name).write_text(text)
            names.append(name.removesuffix(".py"))
    assert len(names) == len(set(names)) == 10
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(doc_pages.ROOT))))
    yield tmp_path
    for name in names:
        sys.modules.pop(name, None)


def test_rewards_are_those_of_the_page(here: Path) -> None:
    rows = next(table for table in doc_pages.tables(doc_pages.read("guides/reward.md")) if table[0][0].startswith("`my_rewards:"))
    assert {row[0] for row in rows} == {f"`my_rewards:{name}`" for name in ("close", "Brief", "asked", "lines")}

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
        # A code span of Markdown keeps blanks but not a line's end.
        found = asyncio.run(worth(target.strip("`"), [response.strip("`").replace("\\n", "\n") for response, _ in mine]))
        for score, (response, expected) in zip(found, mine, strict=True):
            reward, _, steps = expected.partition(", steps ")
            assert score.reward == pytest.approx(float(reward), abs=1e-4), (target, response)
            told = [] if score.rewards is None else score.rewards[~np.isnan(score.rewards)].tolist()
            assert told == [float(step) for step in steps.split()], (target, response)


def test_samples_are_read_as_the_page_says(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import read_samples  # type: ignore[import-not-found]  # a file of the guide

    monkeypatch.setattr(collectives, "total", lambda tensor: tensor)
    run = SampledRun(tmp_path / "run")
    run.train(run.group(0, ["19", "7"]), 4, drift=0.1, proximal_drift=0.4)
    assert list(read_samples.clipped(tmp_path / "run")) == [("g0.e1.a0.t0", "7"), ("g0.e1.a0.t0", "<eos>")]


def test_a_judge_behind_http_is_whole(here: Path) -> None:
    import judge_server  # type: ignore[import-not-found]  # a file of the guide

    server = judge_server.ThreadingHTTPServer(("127.0.0.1", 0), judge_server.Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    async def ask() -> list[float]:
        section = ScoringSection(scorer=f"http://127.0.0.1:{server.server_address[1]}/score")
        made = loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: "")
        try:
            return [(await made.score(Sample(QUESTION, response, ANSWER, (1,), (True,)))).reward for response in ("19", "18")]
        finally:
            await made.close()

    try:
        assert asyncio.run(ask()) == [1.0, 0.0]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Says:
    """A pool whose engine says some texts, one after the other."""

    tokenizer: Tokenizer
    texts: list[str]
    lost_tokens: int = field(default=0)
    recomputed_tokens: int = field(default=0)

    async def generate(self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, **_: object) -> PooledGeneration:
        said = (*self.tokenizer.encode(self.texts.pop(0)), self.tokenizer.eos)
        return PooledGeneration(Generation.of(said, (-0.5,) * len(said), (VersionSpan("1", 0, len(said)),), "stop", 0), 1)


def play(environment: Environment, tokenizer: Tokenizer, texts: list[str]) -> Trajectory:
    pool: Any = Says(tokenizer, texts)
    stage = RolloutContext(pool, Sampling(1.0, 16, (tokenizer.eos,)), tokenizer, Exact(), environment, seed=3)
    (made,) = asyncio.run(episode.run(stage, Prompt(QUESTION, tokenizer.encode(QUESTION), ANSWER), EpisodeId(0, 0, 0)))
    assert not pool.texts
    return made


def test_an_environment_plays_as_the_page_says(here: Path, tokenizer: Tokenizer) -> None:
    page = doc_pages.read("guides/environment.md")
    block = doc_pages.blocks(page, "yaml")[0]
    config = parse(yaml.safe_load(block.text))
    environment = load(config)
    rows = next(table for table in doc_pages.tables(page) if table[0][0] == "`19`")
    assert len(rows) == 3
    for says, reward, text in rows:
        texts = [part.strip("` ") for part in says.split(",")]
        made = play(environment, tokenizer, list(texts))
        assert made.reward == float(reward)
        assert tokenizer.decode(made.tokens.tolist()) == text.strip("`")
        assert tokenizer.decode(made.tokens[made.loss_mask].tolist()) == "".join(texts)
    teaching = Teaching(environment, environment, tokenizer, tokenizer.eos, Bounds(), 0)
    shown = [asyncio.run(teaching.episode(i, Prompt(QUESTION, tokenizer.encode(QUESTION), ANSWER)))[0] for i in range(20)]
    said = [tokenizer.decode(one.tokens[one.loss_mask].tolist()) for one in shown]
    assert all(text.endswith(ANSWER) for text in said)
    assert len(set(said)) > 2, "the teacher is sometimes wrong at first"


def test_a_tool_and_what_it_raises(here: Path) -> None:
    async def ask() -> list[str]:
        (runner,) = load_tools(["my_tools:capital"]).values()
        answers = []
        try:
            for country in ("Japan", "Spain"):
                try:
                    answers.append(await runner.call(country))
                except ToolError as error:
                    answers.append(error.detail)
        finally:
            await runner.close()
        return [runner.name, *answers]

    assert asyncio.run(ask()) == ["capital", "Tokyo", "error: KeyError: 'Spain'"]
    assert "`error: KeyError: 'Spain'`" in doc_pages.read("guides/environment.md")


@pytest.mark.parametrize(("says", "reward"), [("2", 1.0), ("3", 0.0)])
def test_an_agent_of_openais_client(here: Path, tokenizer: Tokenizer, says: str, reward: float) -> None:
    policy = openai_policy.Policy(openai_policy.text(tokenizer, says))

    async def run() -> Any:
        environment = OpenAIEnvironment("my_agent:twice")
        try:
            return await environment.run(policy.episode(tokenizer))
        finally:
            await environment.close()

    assert asyncio.run(run()) == reward
    assert [name for name, _, _ in policy.asked] == ["policy", "policy"]


@pytest.mark.parametrize(("guide", "script"), [("model-family", "try_my_moe.py"), ("objective", "try_my_objective.py")])
def test_a_script_says_what_the_page_says(here: Path, guide: str, script: str) -> None:
    made = subprocess.run([sys.executable, script], cwd=here, capture_output=True, text=True, timeout=60, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    (block,) = doc_pages.blocks(doc_pages.read(f"guides/{guide}.md"), "output")
    assert made.stdout == block.text


def test_a_family_of_ones_own_is_named_as_the_page_says(here: Path) -> None:
    import try_my_moe  # type: ignore[import-not-found]  # a file of the guide

    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps({**try_my_moe.HF, "architectures": ["MyMoe"]}))
    config = parse({"run": {"dir": "r", "steps": 1}, "model": {"path": "model", "family": "my_moe:FAMILY"}, "task": {"kind": "arithmetic"}})
    hf = models.hf_config_of(config)
    models.check(config, hf)
    assert models.family_of(hf) is try_my_moe.FAMILY
    with pytest.raises(UserError, match=r"model_type in config\.json: got 'my_moe'"):
        models.family_of(models.load_hf_config(config.model.path))


def numbers(seed: int, count: int) -> list[float]:
    return np.random.default_rng(seed).normal(0, 1, count).tolist()


LENGTHS = (4, 1, 6)


def policy_rows() -> PolicyRows:
    """Three sequences with the advantages 1.5, -0.5 and -2, all sampled but two tokens; one row of padding."""
    places = objective.segments(LENGTHS, 12)
    mask = (places >= 0) & (torch.arange(12) != 0) & (torch.arange(12) != 5)
    new, old, engine = (torch.tensor(numbers(seed, 12)) * 0.5 - 1.0 for seed in (1, 3, 2))
    return PolicyRows(
        mask=mask,
        weights=mask.float(),
        advantages=torch.tensor([1.5, -0.5, -2.0, 0.0])[places],
        behaviour=engine,
        versions=torch.zeros(12, dtype=torch.int64),
        pure=mask,
        segments=places,
        sequences=3,
        logprobs=new.float().requires_grad_(),
        proximal=old.float(),
        version=1,
    )


@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (2.0, 0.3)])
def test_the_loss_of_the_page_is_its_published_formula(here: Path, positive: float, negative: float) -> None:
    """SAPO, arXiv 2511.20347: the objective, and its gradient A 4 p (1 - p) r, with p = sigmoid(tau (r - 1)), both one token at a time."""
    import my_objective  # type: ignore[import-not-found]  # a file of the guide

    rows = policy_rows()
    value, metrics = my_objective.sapo(rows, positive=positive, negative=negative)
    (gradient,) = torch.autograd.grad(value.sum(), rows.logprobs)
    for at in range(len(value)):
        advantage, ratio = float(rows.advantages[at]), math.exp(float(rows.logprobs[at].detach()) - float(rows.proximal[at]))
        tau = positive if advantage > 0 else negative
        p = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert float(value[at].detach()) == pytest.approx(-advantage * 4 / tau * p, rel=1e-5, abs=1e-7)
        assert float(gradient[at]) == pytest.approx(-advantage * 4 * p * (1 - p) * ratio, rel=1e-4, abs=1e-6)
        assert float(metrics["gate"][at].detach()) == pytest.approx(4 * p * (1 - p), rel=1e-4)


def test_the_weight_of_the_page_is_its_published_formula(here: Path) -> None:
    """TOPR, arXiv 2503.14286: 1 for good sequences, and for bad ones their likelihood ratio, truncated to [0, 1]."""
    import my_objective

    rows = policy_rows()
    value = my_objective.tapered(rows)
    start = 0
    for length in LENGTHS:
        inside = [at for at in range(start, start + length) if rows.mask[at]]
        ratio = math.prod(math.exp(float(rows.proximal[at]) - float(rows.behaviour[at])) for at in inside)
        for at in inside:
            wanted = min(max(ratio, 0.0), 1.0) if rows.advantages[at] < 0 else 1.0
            assert float(value[at]) == pytest.approx(wanted, rel=1e-5), at
        start += length
    assert 0 < float(value.detach()[rows.mask].min()) < 1, "one sequence is truncated, another weighs less"


def test_the_advantage_of_the_page_is_its_published_formula(here: Path) -> None:
    """Lite PPO, arXiv 2508.08221: the mean of the group, the deviation of the batch."""
    import my_objective

    rewards, groups = numbers(4, 9), [0, 0, 0, 1, 1, 2, 2, 2, 2]
    responses = objective.Responses.of(
        rewards=rewards, groups=groups, sampled=[1] * 9, tokens=[2] * 9, oldest_versions=[0] * 9, newest_versions=[0] * 9
    )
    got, metrics = my_objective.lite(responses)
    for reward, group, value in zip(rewards, groups, got, strict=True):
        mean = statistics.fmean(r for r, g in zip(rewards, groups, strict=True) if g == group)
        assert value == pytest.approx((reward - mean) / statistics.pstdev(rewards), rel=1e-6)
    assert metrics["deviation"] == pytest.approx(statistics.pstdev(rewards))
