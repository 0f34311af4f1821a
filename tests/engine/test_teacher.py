"""A teacher's log-probabilities are those of Hugging Face's softmax, for every sampled token and no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring import Sample, Score, Scorer, loading
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.engine.conftest import KEY, Rig
from tests.engine.oracle import Oracle

pytestmark = pytest.mark.engine


def taught(untouched: Rig) -> Scorer:
    teacher = {"url": untouched.engine.client.url, "key_variable": "KEY_OF_THE_TEACHER"}
    section = ScoringSection.model_validate({"scorer": "none", "retries": 0, "teacher": teacher})
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KEY_OF_THE_TEACHER", KEY)
        made = loading.load_teacher(section)
    return made


def conversations(count: int, vocabulary: int) -> list[Sample]:
    """Of several turns, of several lengths; the first begins with what the policy sampled."""
    made = []
    for seed in range(count):
        random = np.random.default_rng(seed)
        size = int(random.integers(20, 200))
        sampled = np.repeat(random.random(size // 10 + 1) < 0.5, 10)[:size]
        sampled[0], sampled[-1] = seed == 0, True
        # The last token of the vocabulary too.
        tokens = (*(int(t) for t in random.integers(3, vocabulary, size - 1)), vocabulary - 1)
        made.append(Sample("", "", "", tokens, tuple(bool(s) for s in sampled)))
    return made


def score(untouched: Rig, scorer: Scorer, samples: list[Sample]) -> list[Score]:
    async def run() -> list[Score]:
        try:
            return await asyncio.gather(*(scorer.score(sample) for sample in samples))
        finally:
            await scorer.close()

    found: list[Score] = untouched.run(run())
    return found


def test_log_probabilities_are_those_of_transformers(untouched: Rig, model: Path, tokenizer: Tokenizer) -> None:
    oracle, samples = Oracle(model), conversations(9, tokenizer.vocabulary)[1:]
    largest = 0.0
    for sample, found in zip(samples, score(untouched, taught(untouched), samples), strict=True):
        assert (found.teacher.dtype, found.teacher.shape) == (np.float32, (len(sample.tokens),))
        with torch.no_grad():
            table = oracle.model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
        expected = [table[i - 1, token].item() if sample.sampled[i] else 0.0 for i, token in enumerate(sample.tokens)]
        largest = max(largest, float(np.abs(found.teacher - np.array(expected)).max()))
    print(f"largest difference {largest:.1e}")
    assert largest < 1e-4


def test_a_first_token_has_no_log_probability(untouched: Rig, tokenizer: Tokenizer) -> None:
    with pytest.raises(TrajectoryRejected, match="scorer_nan: the teacher's log-probability of token 0 is None"):
        score(untouched, taught(untouched), conversations(1, tokenizer.vocabulary))


def test_a_conversation_longer_than_the_teachers_context_is_refused_in_its_words(untouched: Rig) -> None:
    with pytest.raises(TrajectoryRejected, match=r"scorer_garbage: .*/generate: status 400: .*context length"):
        score(untouched, taught(untouched), [Sample("", "", "", (5,) * 5000, (False,) + (True,) * 4999)])
