"""A real engine's response becomes a trajectory that records exactly how it was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.engines.types import Sampling
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Recording, validate
from tests.engine.conftest import Rig
from tests.engine.oracle import Oracle, largest_difference
from tests.prompts import arithmetic

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("temperature", "top_k", "most"), [(0.7, None, 48), (1e-6, None, 4), (0.7, 2, 4)])  # the least of a run's
def test_log_probabilities_are_those_of_transformers(
    rig: Rig, model: Path, tokenizer: Tokenizer, temperature: float, top_k: int | None, most: int
) -> None:
    task, oracle = arithmetic(tokenizer, ("+",), 3, seed=1), Oracle(model)
    sampling = Sampling(temperature, most, (tokenizer.eos,), top_k=top_k)
    for record in rig.run(rig.sampled(task, tokenizer, 8, lambda _: sampling)):
        validate(record, Recording(vocabulary=tokenizer.vocabulary))
        prompt = record.tokens[~record.loss_mask].tolist()
        response = record.tokens[record.loss_mask].tolist()
        assert task.prompt(record.group).tokens == tuple(prompt)
        expected = oracle.logprobs(prompt, response, temperature)
        assert largest_difference(record.logprobs[record.loss_mask].tolist(), expected) < 1e-4
        assert record.is_pure
        assert set(record.seconds) == {"generate", "score"}


def test_the_token_that_ends_a_response_is_part_of_it(rig: Rig, tokenizer: Tokenizer) -> None:
    async def ask(stop: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
        generation = (await rig.pool.generate([20, 30], Sampling(1.0, 64, stop))).generation
        return generation.finish, generation.tokens, len(generation.logprobs)

    stops = tuple(range(0, tokenizer.vocabulary, 4))
    for finish, tokens, logprobs in [rig.run(ask(stops)) for _ in range(4)]:
        assert finish == "stop"
        assert [token in stops for token in tokens] == [False] * (len(tokens) - 1) + [True]
        assert logprobs == len(tokens)
    finish, tokens, _ = rig.run(ask(()))
    assert (finish, len(tokens)) == ("length", 64)


def test_a_prompt_too_long_is_rejected_in_the_engines_words(rig: Rig) -> None:
    with pytest.raises(TrajectoryRejected, match=r"engine_error.*engine\.0: /generate: .*context length"):
        rig.run(rig.pool.generate([5] * 5000, Sampling(1.0, 4, ())))
    assert rig.pool.serving


def test_a_prefix_is_shared_under_its_salt_only(rig: Rig) -> None:
    prompt = list(range(40, 90))

    async def cached(salt: str) -> int:
        return (await rig.engine.client.generate(prompt, Sampling(1.0, 1, ()), salt, 30.0)).cached_tokens

    assert [rig.run(cached(salt)) for salt in ("a", "a", "b")] == [0, len(prompt) - 1, 0]
