"""A plain `openai` client drives an episode on a real engine; tokens, routes, masks and versions are captured underneath."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncmoe.config.tool_parsers import SGLANG_PARSERS
from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.openai_endpoint.environment import OpenAIEnvironment
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Trajectory, decode_masks, decode_routes, validate
from tests.engine.conftest import RECORDING, Rig
from tests.engine.openai_agent import LETTERS
from tests.engine.oracle import Oracle, comparable, routes

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("agent", ["two_questions", "streamed_and_stopped"])
def test_an_agent_written_for_openai_is_recorded_unchanged(untouched: Rig, model: Path, tokenizer: Tokenizer, agent: str) -> None:
    oracle, stopped = Oracle(model), 0
    for made in play(untouched, tokenizer, agent, 4):
        (record,) = made
        sampled = np.flatnonzero(record.loss_mask)
        first = int(sampled[np.argmax(np.append(np.diff(sampled), 2) > 1)]) + 1
        lengths = first - int(sampled[0]), len(sampled) - (first - int(sampled[0]))
        assert record.reward == lengths[0] * 100 + lengths[1]
        assert lengths[0] <= 12
        assert lengths[1] <= 9
        text = tokenizer.decode(record.tokens[first:].tolist())
        assert "and again?" in text
        if agent == "streamed_and_stopped":
            *earlier, last = (set(tokenizer.decode([token])) & set(LETTERS) for token in record.tokens[int(sampled[0]) : first].tolist())
            assert not any(earlier)
            stopped += bool(last)
        # Both responses were sampled from their prefixes, so the first one's tokens are kept as sampled.
        check_record(oracle, record)
    assert agent == "two_questions" or stopped > 0


def test_paths_of_a_client_that_goes_back_are_recorded_as_sampled(untouched: Rig, model: Path, tokenizer: Tokenizer) -> None:
    oracle = Oracle(model)
    for paths in play(untouched, tokenizer, "goes_back", 2):
        first, other, edited = paths
        assert [(t.branch, t.parent, t.reward) for t in paths] == [(0, 0, 1.0), (1, 0, 0.0), (2, 0, 1.0)]
        sampled = np.flatnonzero(first.loss_mask)
        shared = int(sampled[np.argmax(np.append(np.diff(sampled), 2) > 1)]) + 1
        assert (first.forked, other.forked, edited.forked) == (0, shared, 0)
        np.testing.assert_array_equal(first.tokens[:shared], other.tokens[:shared])
        assert other.loss_mask[shared:].any()
        for record in paths:
            check_record(oracle, record)


def test_sglangs_parsers_read_tool_calls_of_model_families(untouched: Rig) -> None:
    """The same calls and the same other text as SGLang's own classes gave for the file; and no parser finds a call in plain words."""
    kept = json.loads((Path(__file__).parents[1] / "unit" / "data" / "tool_calls.json").read_text(encoding="utf-8"))
    cases = [case for case in kept["cases"] if case["parser"] in SGLANG_PARSERS]

    async def read(said: str, parser: str) -> list[dict[str, str]]:
        calls = await untouched.pool.parse_calls(said, parser, kept["tools"])
        return [{"name": call.name, "parameters": call.parameters, "rest": call.rest} for call in calls]

    for case in cases:
        wanted = [{**call, "rest": case["rest"]} for call in case["calls"]]
        assert untouched.run(read(case["said"], case["parser"])) == wanted, case
    for parser in SGLANG_PARSERS:
        assert untouched.run(read("nothing", parser)) == []


def play(rig: Rig, tokenizer: Tokenizer, agent: str, episodes: int) -> list[tuple[Trajectory, ...]]:
    sampling = Sampling(0.7, 16, (tokenizer.eos,), top_p=0.9, top_k=40, recording=RECORDING)
    agents = OpenAIEnvironment(f"tests.engine.openai_agent:{agent}")
    stage = RolloutContext(rig.pool, sampling, tokenizer, Exact(), agents)

    async def run() -> list[tuple[Trajectory, ...]]:
        prompts = [
            Prompt(f"question {n}", tokenizer.encode(tokenizer.render([{"role": "user", "content": f"question {n}"}])), "")
            for n in range(episodes)
        ]
        try:
            return await asyncio.gather(*(episode.run(stage, prompt, EpisodeId(n, 0, 0)) for n, prompt in enumerate(prompts)))
        finally:
            await agents.close()

    made = rig.run(run())
    for record in (record for records in made for record in records):
        validate(record, RECORDING)
    return made


def check_record(oracle: Oracle, record: Trajectory) -> None:
    """Compare routes of all tokens, and masks and log-probabilities of those that count as sampled, with transformers; up to a near tie."""
    recorded = decode_routes(record.routes, record.key)
    count = comparable(oracle.model, record.tokens, recorded)
    found, expected = (np.sort(experts)[:, : count - 1] for experts in (recorded, routes(oracle.model, record.tokens)))
    np.testing.assert_array_equal(found, expected, err_msg="no near tie")
    with torch.no_grad():
        logprobs = (oracle.model(torch.from_numpy(record.tokens).long()[None]).logits[0] / 0.7).log_softmax(-1)
    masks = decode_masks(record.masks, record.key)
    for t in np.flatnonzero(record.loss_mask[:count]).tolist():
        support = logprobs[t - 1, masks.ids[masks.offsets[t] : masks.offsets[t + 1]].tolist()]
        assert abs(record.logprobs[t] - float(logprobs[t - 1, record.tokens[t]] - support.logsumexp(0))) < 1e-4
