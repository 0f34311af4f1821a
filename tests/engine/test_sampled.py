"""What a real engine reports about routes and masks, parsed and packed, is what transformers computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncmoe.engines.types import Sampling
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.trajectory import Recording, Trajectory, decode_masks, decode_routes, validate
from asyncmoe.trajectory.sent_routes import from_bytes
from tests.engine.conftest import RECORDING, Rig
from tests.engine.oracle import routes

pytestmark = pytest.mark.engine

PROMPT = (20, 30, 40, 50, 60)
OBSERVATION = (7, 8, 9)
# A random model is nearly uniform: with this top-p either of the two cuts some supports.
SAMPLING = Sampling(0.7, 20, (), top_p=0.3, top_k=50, recording=replace(RECORDING, top=8))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def record(untouched: Rig) -> Trajectory:
    """Of two turns with an observation between them, by an engine with the checkpoint's weights."""

    async def play() -> Trajectory:
        client = untouched.engine.client
        first = Turn(PROMPT, await client.generate(PROMPT, SAMPLING, "0", 60.0), 0)
        seen = (*PROMPT, *first.generation.tokens.tolist(), *OBSERVATION)
        answer = await client.generate(seen, SAMPLING, "0", 60.0, routed=len(first) - 1)
        assert from_bytes(answer.routes, "g0").rows == len(OBSERVATION) + 20  # what the first turn has is not sent again
        return assemble([first, Turn(OBSERVATION, answer, 0)], EpisodeId(0, 0, 0), SAMPLING.recording, 0.0, {})

    trajectory: Trajectory = untouched.run(play())
    return trajectory


def test_two_turns_are_one_record(record: Trajectory) -> None:
    validate(record, SAMPLING.recording, newest_version=0)
    assert record.loss_mask.tolist() == [*[False] * 5, *[True] * 20, *[False] * 3, *[True] * 20]
    assert record.is_pure


def test_routes_are_those_of_transformers(record: Trajectory, reference: Any) -> None:
    np.testing.assert_array_equal(decode_routes(record.routes, "g0"), routes(reference, record.tokens))


def test_masks_and_log_probabilities_over_them_are_those_of_transformers(record: Trajectory, reference: Any) -> None:
    masks = decode_masks(record.masks, "g0")
    places = np.flatnonzero(record.loss_mask)
    assert masks.counts[~record.loss_mask].tolist() == [0] * 8
    with torch.no_grad():
        logits = reference(torch.from_numpy(record.tokens).long()[None]).logits[0, places - 1] / SAMPLING.temperature
    most, ids = logits.softmax(-1).topk(50)
    # `top_k_top_p_min_p_sampling_from_probs_torch`: top-p counts shares of the whole vocabulary, not of the top-k.
    kept = most.cumsum(-1) - most <= SAMPLING.top_p
    assert kept.sum(-1).min() < 50
    for row, mine, keep, values, top in zip(places, ids, kept, logits, record.top, strict=True):
        expected = mine[keep].sort().values
        assert masks.ids[masks.offsets[row] : masks.offsets[row + 1]].tolist() == expected.tolist()
        logprob = values[record.tokens[row]] - values[expected].logsumexp(0)
        assert record.logprobs[row] == pytest.approx(float(logprob), abs=1e-5)
        top = top[np.isfinite(top["logprob"])]
        assert top["id"].tolist() == mine[keep][:8].tolist()
        np.testing.assert_allclose(top["logprob"], values[mine[keep][:8]] - values[expected].logsumexp(0), atol=1e-5)


def test_without_masks_most_probable_ids_are_those_of_the_whole_vocabulary(untouched: Rig, reference: Any) -> None:
    recording = Recording(vocabulary=RECORDING.vocabulary, top=8)
    found = untouched.run(untouched.engine.client.generate(PROMPT, Sampling(0.7, 12, (), recording=recording), "0", 60.0))
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPT, *found.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    values, ids = (logits / 0.7).log_softmax(-1).topk(8)
    assert found.top["id"].tolist() == ids.tolist()
    np.testing.assert_allclose(found.top["logprob"], values, atol=1e-5)
